//! A short training, which every rank of a case runs.

use std::path::PathBuf;
use std::time::Duration;

use models::module::{self, LanguageModel};
use models::{DecoderConfig, Gpt2, Gpt2Config, Llama};
use runtime::collectives::Group as Ranks;
use serde::{Deserialize, Serialize};
use sharding::{Reduction, ShardedOptimizer, ShardingConfig, Stage};
use tch::Kind;
use training::activations::{Activations, LayerPlan};
use training::optimizer::{AdamW, AdamW8bit, DeviceOptimizer, Group, Lion, Optimizer, Rule};
use training::{Trainer, trainer};

use crate::faults::delay_backward;
use crate::faulty::{Faulty, Injected};
use crate::trainings::Place;
use crate::{saving, trainings};

/// The dtype of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) enum Dtype {
    Fp32,
    Bf16,
    Fp64,
}

/// The rule of the optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) enum RuleName {
    AdamW,
    AdamW8bit,
    Lion,
}

impl RuleName {
    fn rule(self) -> Box<dyn Rule> {
        match self {
            Self::AdamW => Box::new(AdamW::default()),
            Self::AdamW8bit => Box::new(AdamW8bit::default()),
            Self::Lion => Box::new(Lion::default()),
        }
    }
}

/// A training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Case {
    /// ZeRO's; 0 for the ordinary optimizer, in one process.
    pub(crate) stage: usize,
    /// Replicas among which the ranks are divided.
    pub(crate) replicas: usize,
    pub(crate) place: Place,
    /// Whether the backend's own collectives reduce.
    pub(crate) native: bool,
    pub(crate) dtype: Dtype,
    pub(crate) rule: RuleName,
    pub(crate) master_weights: bool,
    /// The seed of stochastic rounding.
    pub(crate) stochastic_rounding: Option<u64>,
    /// Micro-batches of a step.
    pub(crate) micro_batches: usize,
    pub(crate) clip: bool,
    pub(crate) dropout: bool,
    /// Freezes the first layer, and recomputes the others.
    pub(crate) recompute: bool,
    pub(crate) bucket_bytes: usize,
    pub(crate) steps: u64,
    pub(crate) fault: Option<Injected>,
    /// Whether each rank waits for random times.
    pub(crate) delays: bool,
    /// Of the ranks for each other.
    pub(crate) timeout: Duration,
    /// The checkpoints' folder; a training resumes from what is there.
    pub(crate) folder: Option<PathBuf>,
    /// Size of the vocabulary, with 128 numbers for each token instead of 24; 0 for 61 tokens.
    pub(crate) vocabulary: i64,
    /// Saves and reads its state at the end, and prints the memory that it takes.
    pub(crate) measured: bool,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            stage: 1,
            replicas: 1,
            place: Place::Host,
            native: false,
            dtype: Dtype::Fp32,
            rule: RuleName::AdamW,
            master_weights: false,
            stochastic_rounding: None,
            micro_batches: 4,
            clip: false,
            dropout: false,
            recompute: false,
            bucket_bytes: 20_000,
            steps: 3,
            fault: None,
            delays: false,
            timeout: trainings::TIMEOUT,
            folder: None,
            vocabulary: 0,
            measured: false,
        }
    }
}

impl Case {
    /// A GPT-2 with dropout, or a Qwen2 whose embedding is its head too.
    fn model(&self) -> Box<dyn LanguageModel> {
        runtime::random::seed(1).unwrap();
        let kind = match self.dtype {
            Dtype::Fp32 => Kind::Float,
            Dtype::Bf16 => Kind::BFloat16,
            Dtype::Fp64 => Kind::Double,
        };
        let options = (kind, self.place.device());
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
            let (vocabulary, hidden) = if self.vocabulary > 0 { (self.vocabulary, 128) } else { (61, 24) };
            let config = DecoderConfig::qwen2(vocabulary, hidden, 56, 3, 2);
            let config = DecoderConfig { tie_word_embeddings: true, ..config };
            Box::new(Llama::new(&config, options).unwrap())
        };
        if self.recompute {
            let first = if self.dropout { "h\\.0\\..*" } else { "layers\\.0\\..*" };
            module::freeze(model.as_ref(), first, true).unwrap();
            let plan = [LayerPlan::KeepAll, LayerPlan::RecomputeAll, LayerPlan::RecomputeMlp];
            // Dropped where the process ends.
            std::mem::forget(Activations::install(model.as_mut(), &plan).unwrap());
        }
        model
    }

    fn optimizer(&self, model: &dyn LanguageModel, ranks: &Ranks) -> Box<dyn Optimizer> {
        let parameters = module::trainable(model);
        let order = parameters.iter().map(|(name, _)| name.clone()).collect();
        let groups = Group::by_dimension(parameters, 3e-3, 0.1);
        let stage = match self.stage {
            0 => {
                let optimizer = DeviceOptimizer::boxed(self.rule.rule(), groups).unwrap();
                return Box::new(match self.stochastic_rounding {
                    Some(seed) => optimizer.with_stochastic_rounding(seed),
                    None => optimizer,
                });
            }
            1 => Stage::One,
            _ => Stage::Two,
        };
        let options = ShardingConfig {
            stage,
            reduction: if self.native { Reduction::Native } else { Reduction::Ordered },
            master_weights: self.master_weights,
            stochastic_rounding: self.stochastic_rounding,
            bucket_bytes: self.bucket_bytes,
            order,
            one_addition: false,
            shards: None,
        };
        let mesh = trainings::mesh(ranks, self.replicas, self.place).unwrap();
        Box::new(ShardedOptimizer::boxed(self.rule.rule(), groups, mesh, options).unwrap())
    }

    /// Trains, and prints losses, norms, weights and state as lines that begin with the training's number.
    pub(crate) fn run(&self, ranks: &Ranks, number: usize) -> training::Result<()> {
        let model = self.model();
        if self.delays {
            delay_backward(&module::trainable(model.as_ref()), ranks.rank());
        }
        let optimizer = self.optimizer(model.as_ref(), ranks);
        let options = trainer::TrainerConfig {
            steps: self.steps,
            accumulation: self.micro_batches,
            clip: self.clip.then_some(0.5),
            log_every: 1,
            checkpoint_every: Some(1),
            ..trainer::TrainerConfig::default()
        };
        let optimizer: Box<dyn Optimizer> = match self.fault.is_some() || self.delays {
            true => Box::new(Faulty::new(optimizer, ranks, self.fault, self.delays, None)),
            false => optimizer,
        };
        let mut trainer = Trainer::new(model, optimizer, options).unwrap();
        trainings::train(&mut trainer, ranks, number, (self.folder.as_deref(), 0))?;
        if self.measured { saving::measure(&mut trainer, ranks, number) } else { Ok(()) }
    }
}
