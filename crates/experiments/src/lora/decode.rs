//! `lora decode`: tokens per second of generation on a real model's shape.

use std::time::Instant;

use anyhow::Context;
use clap::Args;
use kernels::physical;
use models::Llama;
use models::generation::{GenerationConfig, generate};
use models::module::{LanguageModel, parameters};
use report::cli::Scale;
use report::{Case, Metric};
use runtime::measure::Measurement;
use tch::{Device, Kind, Tensor};

use crate::driver::Bench;
use crate::dtype;
use crate::shape::Shape;

#[derive(Args)]
pub(crate) struct Decode {
    /// qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-7b, tiny, or a config.json [default: by scale]
    #[arg(long, value_delimiter = ',')]
    shape: Vec<Shape>,
    /// Dtypes of the weights: fp32, bf16, fp16, nf4
    #[arg(long, value_delimiter = ',', default_value = "fp32,bf16,nf4", value_parser = dtype::parse_weights)]
    dtype: Vec<Kind>,
    /// Prompts per batch
    #[arg(long, value_delimiter = ',', default_value = "1,4,8", value_parser = clap::value_parser!(i64).range(1..))]
    batch: Vec<i64>,
    /// Tokens of a prompt
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(i64).range(1..))]
    prompt: i64,
    /// New tokens per prompt
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(2..))]
    new_tokens: u32,
    /// Measured repeats [default: 1, at scale full 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: Option<u32>,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Decode) -> anyhow::Result<()> {
    let device = bench.device;
    let (usual, repeats) = match bench.scale {
        Scale::Smoke | Scale::Laptop => (vec![Shape::at_scale(bench.scale)], 1),
        Scale::Full | Scale::Paper => (vec![Shape::Small, Shape::Medium], 3),
    };
    let shapes = if arguments.shape.is_empty() { &usual } else { &arguments.shape };
    let repeats = arguments.repeats.unwrap_or(repeats);
    let steps = arguments.dtype.len() + arguments.batch.len();
    bench.expect(shapes.len() * steps);
    for shape in shapes {
        let mut models = Vec::new();
        for &kind in &arguments.dtype {
            bench.message(&format!("{} in {}: drawing weights", shape.name(), dtype::name(kind)));
            runtime::random::seed(bench.seed)?;
            let model = shape.model(kind, device)?;
            // The embedding's: what is beside NF4 has another one.
            let computed = parameters(&model).first().map_or(kind, |(_, tensor)| tensor.kind());
            let product = physical::gemm_rate(device, computed, 1024, 1024, 1024)?;
            models.push((model, product.rate().context("the rate of a product")?));
            bench.step();
        }
        for &batch in &arguments.batch {
            bench.message(&format!("{}, {batch} at a time", shape.name()));
            let multiplied = 2.0 * shape.config()?.parameter_count() as f64 * batch as f64;
            let measured = measure(&models, device, (batch, repeats), multiplied, arguments)?;
            let bf16 = arguments.dtype.iter().position(|kind| *kind == Kind::BFloat16);
            for (&kind, model_figures) in arguments.dtype.iter().zip(&measured) {
                let case = Case::new()
                    .with("shape", shape.name())
                    .with("dtype", dtype::name(kind))
                    .with("batch", batch)
                    .with("prompt", arguments.prompt);
                let mut metrics = model_figures.metrics(batch);
                if let Some(bf16) = bf16.filter(|_| kind != Kind::BFloat16) {
                    let pairs = measured[bf16].decoding.iter().zip(&model_figures.decoding);
                    let speeds: Vec<f64> = pairs.map(|(bf16, seconds)| bf16 / seconds).collect();
                    metrics.push(Metric::of_samples("speed_over_bf16", "ratio", &speeds));
                }
                bench.put(&case, metrics)?;
            }
            bench.step();
        }
    }
    Ok(())
}

/// Measurements of one model and number of prompts.
struct Decoding {
    /// Bytes that a token must read: every weight once, but a single row of the embedding, unless it is the head too.
    weight_bytes: f64,
    /// Seconds of a token's products at the rate of a large one in the dtype of the computation.
    computed: f64,
    /// For each repeat: seconds of the prompts, and of a token of each row.
    reading: Vec<f64>,
    decoding: Vec<f64>,
    /// For each repeat: bytes per second of a copy and of reading, means of before and after.
    copied: Vec<f64>,
    read: Vec<f64>,
}

/// Measures all models in turn, each given with the rate of a large product in its dtype, and the memory between two of them: other users
/// of the machine's memory change both from one second to the next. Decoding is timed from a row's first new token on; reading the prompt
/// ends with that.
fn measure(
    models: &[(Llama, f64)],
    device: Device,
    (batch, repeats): (i64, u32),
    flops: f64,
    arguments: &Decode,
) -> anyhow::Result<Vec<Decoding>> {
    let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as f64;
    let empty = |(model, rate): &(Llama, f64)| Decoding {
        weight_bytes: parameters(model).iter().map(|(_, tensor)| bytes(tensor)).sum(),
        computed: flops / rate,
        reading: Vec::new(),
        decoding: Vec::new(),
        copied: Vec::new(),
        read: Vec::new(),
    };
    let mut measured: Vec<Decoding> = models.iter().map(empty).collect();
    let memory = || -> anyhow::Result<[f64; 2]> {
        let rate =
            |measurement: runtime::Result<Measurement>| measurement?.rate().context("the rate of the memory");
        Ok([rate(physical::copy_bandwidth(device))?, rate(physical::read_bandwidth(device))?])
    };
    let prompts = Prompts { rows: batch, tokens: arguments.prompt, new: arguments.new_tokens };
    // The first time fills caches.
    for (model, _) in models {
        seconds(model, prompts)?;
    }
    let mut before = memory()?;
    for _ in 0..repeats {
        for ((model, _), model_figures) in models.iter().zip(&mut measured) {
            let [reading, decoding] = seconds(model, prompts)?;
            let after = memory()?;
            model_figures.reading.push(reading);
            model_figures.decoding.push(decoding);
            model_figures.copied.push(f64::midpoint(before[0], after[0]));
            model_figures.read.push(f64::midpoint(before[1], after[1]));
            before = after;
        }
    }
    Ok(measured)
}

/// Prompts of made-up tokens.
#[derive(Clone, Copy)]
pub(super) struct Prompts {
    pub(super) rows: i64,
    /// Tokens of a prompt.
    pub(super) tokens: i64,
    /// New tokens after each.
    pub(super) new: u32,
}

/// Returns the seconds of reading the prompts, and of a token of each.
pub(super) fn seconds(model: &dyn LanguageModel, sizes: Prompts) -> anyhow::Result<[f64; 2]> {
    let vocabulary = model.vocabulary();
    let token = |row: i64, place: i64| (row * 7919 + place * 104_729 + 13) % vocabulary;
    let prompts: Vec<Vec<i64>> =
        (0..sizes.rows).map(|row| (0..sizes.tokens).map(|place| token(row, place)).collect()).collect();
    let options = GenerationConfig { max_new_tokens: sizes.new as usize, ..GenerationConfig::default() };
    let start = Instant::now();
    let mut first = None;
    let mut watch = |_: usize, _: &[i64]| {
        first.get_or_insert_with(Instant::now);
        false
    };
    generate(model, &prompts, &options, &mut watch)?;
    let first = first.context("nothing was generated")?;
    let token = first.elapsed().as_secs_f64() / f64::from(sizes.new - 1);
    Ok([first.duration_since(start).as_secs_f64(), token])
}

impl Decoding {
    fn metrics(&self, batch: i64) -> Vec<Metric> {
        let per_repeat = |value: &dyn Fn(usize, f64) -> f64| -> Vec<f64> {
            self.decoding.iter().enumerate().map(|(repeat, seconds)| value(repeat, *seconds)).collect()
        };
        let copied = |repeat: usize| self.weight_bytes / self.copied[repeat];
        let least = |repeat: usize| (self.weight_bytes / self.read[repeat]).max(self.computed);
        vec![
            Metric::of_samples("prompt_seconds", "s", &self.reading),
            Metric::of_samples("token_seconds", "s", &self.decoding),
            Metric::of_samples(
                "tokens_per_second",
                "tokens/s",
                &per_repeat(&|_, seconds| batch as f64 / seconds),
            ),
            Metric::exact("weight_bytes", "B", self.weight_bytes),
            Metric::of_samples(
                "weight_bandwidth",
                "B/s",
                &per_repeat(&|_, seconds| self.weight_bytes / seconds),
            ),
            Metric::of_samples("copy_bandwidth", "B/s", &self.copied),
            Metric::of_samples("read_bandwidth", "B/s", &self.read),
            Metric::of_samples(
                "share_of_copy_bandwidth",
                "ratio",
                &per_repeat(&|repeat, seconds| copied(repeat) / seconds),
            ),
            Metric::of_samples(
                "share_of_limit",
                "ratio",
                &per_repeat(&|repeat, seconds| least(repeat) / seconds),
            ),
        ]
    }
}
