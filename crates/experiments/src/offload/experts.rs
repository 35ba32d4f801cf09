//! `offload experts`: mixtures of experts whose experts are streamed from files, over the share of them that memory has room for.

use std::path::{Path, PathBuf};
use std::time::Instant;

use accounting::Decoder;
use accounting::decoder_flops::Workload;
use accounting::experts;
use accounting::memory::recipe::Recipe;
use clap::Args;
use lora::LoraConfig;
use models::generation::{GenerationConfig, generate};
use models::hugging_face::{self, Folder, SHARD_BYTES};
use models::llama::{Family, Mixture};
use models::module::{Context, Input, LanguageModel, trainable};
use models::{DecoderConfig, Llama};
use offload::{ExpertConfig, StreamedExperts};
use report::{Case, Metric};
use runtime::autograd::{backward, set_grad};
use tch::{Device, Kind, Tensor};

use super::folder::scratch;
use super::measured_model::random_tokens;
use crate::driver::Bench;

/// Tokens that are generated.
const GENERATED: usize = 16;

#[derive(Args)]
pub(crate) struct Experts {
    /// How often each step is measured
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Where the model lies [default: beside this program]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

/// The work of a step.
#[derive(Clone, Copy)]
enum Step {
    /// Forward and backward of adapters of the attention, over so many tokens.
    Training(i64),
    /// Tokens that are generated one after the other.
    Generation,
}

impl Step {
    fn case(self, share: Option<u64>) -> Case {
        let case = match self {
            Self::Training(tokens) => Case::new().with("pass", "training").with("tokens", tokens),
            Self::Generation => Case::new().with("pass", "generation").with("tokens", 1),
        };
        case.with("memory", share.map_or("all resident".to_owned(), |share| format!("{share} %")))
    }
}

/// Measurements of a step.
#[derive(Default)]
struct Seen {
    rates: Vec<f64>,
    loaded: Vec<f64>,
    requested: f64,
    loads: f64,
    waited: Vec<f64>,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Experts) -> anyhow::Result<()> {
    runtime::memory::track_cpu()?;
    let (config, sweep, rounds): (_, &[i64], u32) = bench.sized([
        (shape(64, (8, 2, 32), 2), &[4], 1),
        (shape(512, (128, 8, 192), 2), &[8, 64, 256], 1),
        (shape(1024, (128, 8, 384), 4), &[8, 64, 256], 3),
        (shape(2048, (128, 8, 768), 48), &[64, 1024], 2),
    ]);
    let rounds = arguments.rounds.unwrap_or(rounds);
    let scratch = scratch(arguments.folder.as_deref())?;
    let path = scratch.path().join("model");
    write(&config, bench.seed, &path)?;
    let folder = Folder::open(&path)?;

    // Experts that memory has room for, in per cent of all; first a model without streaming.
    let shares = [None, Some(100), Some(50), Some(25), Some(10)];
    let label = |share: &&Option<u64>| share.map_or("all resident".to_owned(), |share| format!("{share} %"));
    bench.each(&shares, label, |bench, &share| {
        let (mut model, streamed) = open(&folder, share)?;
        for step in [Step::Generation].into_iter().chain(sweep.iter().map(|&tokens| Step::Training(tokens))) {
            if let Step::Training(_) = step
                && trainable(&model).iter().all(|(name, _)| !name.contains("lora"))
            {
                adapt(&mut model)?;
            }
            let mut seen = Seen::default();
            // The first run fills the slots.
            for round in 0..=rounds {
                let one = seen_of(&model, streamed.as_ref(), step, bench.seed)?;
                if round > 0 {
                    seen.add(one);
                }
            }
            let metrics = seen.metrics(&config, step, streamed.as_ref())?;
            bench.put(&step.case(share), metrics)?;
        }
        Ok(())
    })
}

/// Qwen3-MoE of this width, with experts of a layer, experts of a token and inner width, and so many layers.
fn shape(hidden: i64, (experts, per_token, inner): (i64, i64, i64), layers: i64) -> DecoderConfig {
    let mixture = Mixture {
        experts,
        per_token,
        intermediate_size: inner,
        shared: None,
        clamped: None,
        normalizes: true,
        step: 1,
        dense_layers: Vec::new(),
    };
    let heads = (hidden / 64).max(2);
    DecoderConfig {
        family: Family::Qwen3Moe,
        mixture: Some(mixture),
        num_key_value_heads: heads / 2,
        max_position_embeddings: 4096,
        tie_word_embeddings: true,
        ..DecoderConfig::qwen2(8192, hidden, 3 * hidden, layers, heads)
    }
}

/// Writes a model with random weights in bf16.
fn write(config: &DecoderConfig, seed: u64, path: &Path) -> anyhow::Result<()> {
    runtime::random::seed(seed)?;
    let model = Llama::new(config, (Kind::BFloat16, Device::Cpu))?;
    std::fs::create_dir(path)?;
    Ok(hugging_face::save(&model, path, SHARD_BYTES)?)
}

fn open(folder: &Folder, share: Option<u64>) -> anyhow::Result<(Llama, Option<StreamedExperts>)> {
    let Some(share) = share else { return Ok((folder.load(None, Device::Cpu)?, None)) };
    let model = Decoder::from_config(folder.config())?;
    let all = model.experts.map_or(0, |experts| experts.layers * experts.count);
    let slot = experts::slot_bytes(&model, &Recipe::BF16)?;
    let cache = (all * slot * share / 100).max(2 * slot);
    let (model, streamed) = ExpertConfig { cache, ..ExpertConfig::default() }.open(folder, None)?;
    Ok((model, Some(streamed)))
}

fn adapt(model: &mut Llama) -> anyhow::Result<()> {
    let names = ["q_proj", "k_proj", "v_proj", "o_proj"].map(str::to_owned).to_vec();
    let config = LoraConfig { target_modules: Some(lora::Names::List(names)), ..LoraConfig::default() };
    LoraConfig { seed: 1, ..config }.install(model)?;
    Ok(())
}

/// Runs a step: tokens per second, bytes read, experts requested and loaded, and the share of the time in which reads were waited for.
fn seen_of(
    model: &Llama,
    streamed: Option<&StreamedExperts>,
    step: Step,
    seed: u64,
) -> anyhow::Result<[f64; 5]> {
    let before = streamed.map(StreamedExperts::counters).unwrap_or_default();
    let vocabulary = model.vocabulary();
    let prompt = random_tokens(vocabulary, &[1, 4], seed, Device::Cpu)?;
    let prompt: Vec<i64> = Vec::try_from(&prompt.f_flatten(0, -1)?)?;
    let began = Instant::now();
    let tokens = match step {
        Step::Generation => {
            let options = GenerationConfig { max_new_tokens: GENERATED, ..GenerationConfig::default() };
            generate(model, &[prompt], &options, &mut ())?;
            GENERATED as f64
        }
        Step::Training(tokens) => {
            let ids = random_tokens(vocabulary, &[1, tokens], seed, Device::Cpu)?;
            train(model, &ids)?;
            tokens as f64
        }
    };
    let seconds = began.elapsed().as_secs_f64();
    let after = streamed.map(StreamedExperts::counters).unwrap_or_default();
    let waited = (after.waited - before.waited).as_secs_f64();
    Ok([
        tokens / seconds,
        (after.loaded - before.loaded) as f64,
        (after.requested - before.requested) as f64,
        (after.loads - before.loads) as f64,
        waited / seconds,
    ])
}

fn train(model: &Llama, ids: &Tensor) -> anyhow::Result<()> {
    let context = Context { training: true, ..Context::default() };
    let loss = model.loss(&Input { tokens: ids, positions: None, context }, ids)?.sum;
    backward(&[&loss])?;
    trainable(model).into_iter().try_for_each(|(_, tensor)| set_grad(tensor, None))?;
    Ok(())
}

impl Seen {
    fn add(&mut self, [rate, loaded, requested, loads, waited]: [f64; 5]) {
        self.rates.push(rate);
        self.loaded.push(loaded);
        self.requested += requested;
        self.loads += loads;
        self.waited.push(waited);
    }

    fn metrics(
        &self,
        config: &DecoderConfig,
        step: Step,
        streamed: Option<&StreamedExperts>,
    ) -> anyhow::Result<Vec<Metric>> {
        let mut metrics = vec![Metric::of_samples("tokens_per_second", "tokens/s", &self.rates)];
        let Some(streamed) = streamed else { return Ok(metrics) };
        let cache = streamed.slots() as u64 * streamed.expert_bytes();
        let model = Decoder::from_config(config)?;
        let passes = match step {
            Step::Training(_) => 2,
            Step::Generation => GENERATED as u64,
        };
        let tokens = match step {
            Step::Training(tokens) => tokens.unsigned_abs(),
            Step::Generation => 1,
        };
        let work = Workload { batch: 1, sequence: tokens };
        let predicted = passes * experts::pass_bytes(&model, &Recipe::BF16, work, cache)?;
        let uses = (streamed.experts() as u64 * passes) as f64 * self.rates.len() as f64;
        metrics.extend([
            Metric::exact("cache_bytes", "B", cache as f64),
            Metric::exact("used_share", "ratio", self.requested / uses),
            Metric::exact("loads_per_use", "ratio", self.loads / self.requested.max(1.0)),
            Metric::of_samples("loaded_bytes", "B", &self.loaded),
            Metric::of_samples("waited_share", "ratio", &self.waited),
        ]);
        if let Step::Training(_) = step {
            metrics.push(Metric::exact("predicted_bytes", "B", predicted as f64));
        }
        Ok(metrics)
    }
}
