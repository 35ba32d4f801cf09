//! A short training, which every rank of a case runs.
#![allow(clippy::print_stdout, reason = "the results of a rank, which the test reads")]

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use models::module::{self, LanguageModel};
use models::{Gpt2, Gpt2Config, Llama, LlamaConfig};
use runtime::collectives::{Group as Ranks, GroupOptions, Launch, Store};
use sharding::{Options, ShardedOptimizer, Stage};
use tch::{Device, Kind, Tensor};
use training::activations::{self, LayerPlan};
use training::batches::Synthetic;
use training::checkpoint::Checkpoints;
use training::observer::{Observer, StepRecord};
use training::optimizer::{AdamW, DeviceOptimizer, Group, Optimizer};
use training::{Trainer, trainer};

/// The environment variable with a rank's case.
pub(crate) const VARIABLE: &str = "FRUGAL_TEST_TRAINING";

/// A training.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Case {
    /// `None`: the ordinary optimizer, in one process.
    pub(crate) stage: Option<Stage>,
    pub(crate) bf16: bool,
    pub(crate) master_weights: bool,
    /// Micro-batches of a step.
    pub(crate) micro_batches: usize,
    pub(crate) clip: bool,
    pub(crate) dropout: bool,
    /// Freezes the first layer, and recomputes the others.
    pub(crate) recompute: bool,
    pub(crate) bucket_bytes: usize,
    pub(crate) steps: u64,
    /// The last rank sends itself SIGKILL after this step; 0 for never.
    pub(crate) killed_after: u64,
    /// The checkpoints' folder; a training resumes from what is there.
    pub(crate) folder: Option<PathBuf>,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            stage: Some(Stage::One),
            bf16: false,
            master_weights: false,
            micro_batches: 4,
            clip: false,
            dropout: false,
            recompute: false,
            bucket_bytes: 20_000,
            steps: 3,
            killed_after: 0,
            folder: None,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stage = self.stage.map_or(0, |stage| if stage == Stage::One { 1 } else { 2 });
        let flags = [self.bf16, self.master_weights, self.clip, self.dropout, self.recompute].map(u8::from);
        let folder = self.folder.as_ref().map_or_else(String::new, |folder| folder.display().to_string());
        let Self { micro_batches, bucket_bytes, steps, killed_after, .. } = self;
        write!(f, "{stage} {flags:?} {micro_batches} {bucket_bytes} {steps} {killed_after} {folder}")
    }
}

impl Case {
    /// The case that the environment names, in a rank's process.
    pub(crate) fn of_this_rank() -> Option<Self> {
        let text = std::env::var(VARIABLE).ok()?;
        let (stage, rest) = text.split_once(" [").unwrap();
        let (flags, rest) = rest.split_once("] ").unwrap();
        let flags: Vec<bool> = flags.split(", ").map(|flag| flag == "1").collect();
        let mut rest = rest.splitn(5, ' ');
        let mut next = || rest.next().unwrap();
        let (micro_batches, bucket_bytes, steps, killed_after) = (next(), next(), next(), next());
        let folder = next();
        Some(Self {
            stage: [None, Some(Stage::One), Some(Stage::Two)][stage.parse::<usize>().unwrap()],
            bf16: flags[0],
            master_weights: flags[1],
            clip: flags[2],
            dropout: flags[3],
            recompute: flags[4],
            micro_batches: micro_batches.parse().unwrap(),
            bucket_bytes: bucket_bytes.parse().unwrap(),
            steps: steps.parse().unwrap(),
            killed_after: killed_after.parse().unwrap(),
            folder: (!folder.is_empty()).then(|| folder.into()),
        })
    }

    /// A GPT-2 with dropout, or a Qwen2 whose embedding is its head too.
    fn model(&self) -> Box<dyn LanguageModel> {
        runtime::random::seed(1).unwrap();
        let options = (if self.bf16 { Kind::BFloat16 } else { Kind::Float }, Device::Cpu);
        let mut model: Box<dyn LanguageModel> = if self.dropout {
            let config = Gpt2Config {
                vocabulary: 61,
                max_sequence: 16,
                hidden: 24,
                heads: 2,
                layers: 3,
                dropout: 0.2,
                ..Gpt2Config::small()
            };
            Box::new(Gpt2::new(&config, options).unwrap())
        } else {
            let config = LlamaConfig { tie_word_embeddings: true, ..LlamaConfig::qwen2(61, 24, 56, 3, 2) };
            Box::new(Llama::new(&config, options).unwrap())
        };
        if self.recompute {
            let first = if self.dropout { "h\\.0\\..*" } else { "layers\\.0\\..*" };
            module::freeze(model.as_ref(), first, true).unwrap();
            let plan = [LayerPlan::KeepAll, LayerPlan::RecomputeAll, LayerPlan::RecomputeMlp];
            // Dropped where the process ends.
            std::mem::forget(activations::apply(model.as_mut(), &plan).unwrap());
        }
        model
    }

    fn optimizer(&self, model: &dyn LanguageModel, ranks: &Ranks) -> Box<dyn Optimizer> {
        let groups = Group::by_dimension(module::trainable(model), 3e-3, 0.1);
        let Some(stage) = self.stage else {
            let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
            return Box::new(if self.master_weights { optimizer.with_master_weights() } else { optimizer });
        };
        let options = Options { stage, master_weights: self.master_weights, bucket_bytes: self.bucket_bytes };
        Box::new(ShardedOptimizer::new(AdamW::default(), groups, ranks, options).unwrap())
    }

    /// Trains, and prints losses, norms, weights and state as lines that begin with `result`.
    pub(crate) fn run(&self) {
        let launch = Launch::from_environment().unwrap().expect("a rank has its variables");
        tch::set_num_threads(1);
        // Ends the line that the test harness has begun.
        println!();
        let store = Store::connect(&launch, Duration::from_secs(30)).unwrap();
        let options = GroupOptions { timeout: Duration::from_secs(30), ..GroupOptions::default() };
        let ranks = Ranks::new(&store, "training", options).unwrap();
        let model = self.model();
        let optimizer = self.optimizer(model.as_ref(), &ranks);
        let options = trainer::Options {
            steps: self.steps,
            accumulation: self.micro_batches,
            clip: self.clip.then_some(0.5),
            read_every: 1,
            checkpoint_every: Some(1),
            ..trainer::Options::default()
        };
        let mut trainer = Trainer::new(model, optimizer, options).unwrap();
        trainer.observers.push(Box::new(Print));
        if ranks.rank() + 1 == ranks.size() && self.killed_after > 0 {
            trainer.observers.push(Box::new(Kill(self.killed_after)));
        }
        runtime::random::seed(7).unwrap();
        let mut data = Synthetic {
            seed: 3,
            vocabulary: 61,
            rows: 2,
            length: 12,
            noise: 2,
            batches: None,
            device: Device::Cpu,
            position: 0,
        };
        if let Some(folder) = &self.folder {
            if ranks.rank() == 0 {
                trainer.checkpoints = Some(Checkpoints::open(folder, 100).unwrap());
            }
            ranks.barrier("checkpoints").unwrap();
            if ranks.rank() > 0 {
                trainer.checkpoints = Some(Checkpoints::reader(folder));
            }
            trainer.resume(&mut data).unwrap();
        }
        trainer.run(&mut data, None).unwrap();
        for (name, tensor) in module::parameters(trainer.model.as_ref()) {
            println!("result weight {name} {:016x}", bits(tensor));
        }
        let mut state = trainer.optimizer.state().unwrap();
        state.sort_by(|(a, _), (b, _)| a.cmp(b));
        for (name, tensor) in state {
            println!("result state {name} {:?} {:016x}", tensor.size(), bits(&tensor));
        }
        ranks.barrier("end").unwrap();
    }
}

#[derive(Debug)]
struct Print;

impl Observer for Print {
    fn on_step(&mut self, step: &StepRecord) -> training::Result<()> {
        let StepRecord { step, loss, gradient_norm, tokens, targets, .. } = step;
        let norm = gradient_norm.map(f64::to_bits);
        println!(
            "result step {step} loss {:016x} norm {norm:x?}, {tokens} tokens, {targets} targets",
            loss.to_bits()
        );
        Ok(())
    }
}

/// Kills the process after a step.
#[derive(Debug)]
struct Kill(u64);

impl Observer for Kill {
    fn on_step(&mut self, step: &StepRecord) -> training::Result<()> {
        if step.step == self.0 {
            let own = std::process::id().to_string();
            std::process::Command::new("kill").args(["-9", &own]).status().unwrap();
        }
        Ok(())
    }
}

/// FNV-1a of a tensor's bytes.
fn bits(tensor: &Tensor) -> u64 {
    let tensor = tensor.detach().contiguous().view([-1]).view_dtype(Kind::Uint8);
    let bytes = Vec::<u8>::try_from(tensor).unwrap();
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
