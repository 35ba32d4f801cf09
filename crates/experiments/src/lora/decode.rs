//! `lora decode`: tokens per second of generation on a real model's shape.

use std::time::Instant;

use anyhow::Context;
use clap::Args;
use models::generation::{GenerateOptions, generate};
use models::module::{LanguageModel, parameters};
use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress, Sink};
use runtime::measure::{Samples, physical};
use tch::{Kind, Tensor};

use crate::dtype;
use crate::shape::Shape;

#[derive(Args)]
pub(crate) struct Decode {
    /// Size of the experiment; --shape overrides its shapes
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
    /// qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-7b, tiny, or a config.json
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
    /// Measured repeats
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// The experiment that the records are of
    #[arg(long, default_value = "lora-decode")]
    experiment: String,
}

pub(crate) fn run(common: &CommonArgs, arguments: &Decode) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    let mut sink = Sink::new(common, crate::environment::of(device)?, arguments.scale)?;
    let shapes = match arguments.scale {
        _ if !arguments.shape.is_empty() => arguments.shape.clone(),
        Scale::Smoke | Scale::Laptop => vec![Shape::of(arguments.scale)],
        Scale::Full | Scale::Paper => vec![Shape::Small, Shape::Medium],
    };
    let rows = shapes.len() * arguments.dtype.len() * arguments.batch.len();
    let mut progress = Progress::new(rows as u64);
    for shape in &shapes {
        let mut bf16 = Vec::new();
        for &kind in &arguments.dtype {
            let name = format!("{} in {}", shape.name(), dtype::name(kind));
            progress.message(&format!("{name}: drawing weights"));
            runtime::random::seed(common.seed)?;
            let model = shape.model(kind, device)?;
            for &batch in &arguments.batch {
                progress.message(&format!("{name}, {batch} at a time"));
                let case = Case::new()
                    .with("shape", shape.name())
                    .with("dtype", dtype::name(kind))
                    .with("batch", batch)
                    .with("prompt", arguments.prompt);
                let step = measure(&model, batch, arguments)?;
                let multiplied = 2.0 * shape.config()?.parameter_count() as f64 * batch as f64;
                let mut metrics = step.metrics(batch, multiplied);
                let seconds = Samples { samples: step.decoding }.median();
                if kind == Kind::BFloat16 {
                    bf16.push((batch, seconds));
                } else {
                    let known = bf16.iter().find(|(of, _)| *of == batch);
                    metrics
                        .extend(known.map(|(_, of)| Metric::exact("speed_over_bf16", "ratio", of / seconds)));
                }
                sink.put(&arguments.experiment, &case, metrics)?;
                progress.step();
            }
        }
    }
    Ok(())
}

/// What was measured of one model and number of prompts.
struct Decoding {
    /// Seconds of the prompts, and of a token of each row.
    reading: Vec<f64>,
    decoding: Vec<f64>,
    /// What a token must read: every weight once, but of the embedding one row, unless it is the head too.
    weight_bytes: f64,
    /// Bytes per second of a copy, before and after the measurement: other users of the machine's memory change it.
    copied: f64,
    /// FLOP per second of a large product in the dtype of the computation.
    multiplied: f64,
}

/// Decoding is timed from a row's first new token on; reading the prompt ends with that.
fn measure(model: &dyn LanguageModel, batch: i64, arguments: &Decode) -> anyhow::Result<Decoding> {
    let vocabulary = model.vocabulary();
    let token = |row: i64, place: i64| (row * 7919 + place * 104_729 + 13) % vocabulary;
    let prompts: Vec<Vec<i64>> =
        (0..batch).map(|row| (0..arguments.prompt).map(|place| token(row, place)).collect()).collect();
    let options =
        GenerateOptions { max_new_tokens: arguments.new_tokens as usize, ..GenerateOptions::default() };
    let parameters = parameters(model);
    let (_, first) = parameters.first().context("a model without parameters")?;
    let (device, kind) = (first.device(), first.kind());
    let copied = || physical::copy_bandwidth(device)?.rate().context("the rate of a copy");
    let before = copied()?;
    let (mut reading, mut decoding) = (Vec::new(), Vec::new());
    for repeat in 0..=arguments.repeats {
        let start = Instant::now();
        let mut first = None;
        let mut watch = |_: usize, _: &[i64]| {
            first.get_or_insert_with(Instant::now);
            false
        };
        generate(model, &prompts, &options, &mut watch)?;
        let first = first.context("nothing was generated")?;
        // The first time fills caches.
        if repeat > 0 {
            reading.push(first.duration_since(start).as_secs_f64());
            decoding.push(first.elapsed().as_secs_f64() / f64::from(arguments.new_tokens - 1));
        }
    }
    let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as f64;
    let product = physical::gemm_rate(device, kind, 1024, 1024, 1024)?;
    Ok(Decoding {
        reading,
        decoding,
        weight_bytes: parameters.iter().map(|(_, tensor)| bytes(tensor)).sum(),
        copied: (before + copied()?) / 2.0,
        multiplied: product.rate().context("the rate of a product")?,
    })
}

impl Decoding {
    fn metrics(&self, batch: i64, flops: f64) -> Vec<Metric> {
        let of =
            |value: &dyn Fn(f64) -> f64| -> Vec<f64> { self.decoding.iter().map(|s| value(*s)).collect() };
        let (read, computed) = (self.weight_bytes / self.copied, flops / self.multiplied);
        vec![
            Metric::of_samples("prompt_seconds", "s", &self.reading),
            Metric::of_samples("token_seconds", "s", &self.decoding),
            Metric::of_samples("tokens_per_second", "tokens/s", &of(&|seconds| batch as f64 / seconds)),
            Metric::exact("weight_bytes", "B", self.weight_bytes),
            Metric::of_samples("weight_bandwidth", "B/s", &of(&|seconds| self.weight_bytes / seconds)),
            Metric::of_samples("share_of_copy_bandwidth", "ratio", &of(&|seconds| read / seconds)),
            Metric::of_samples("share_of_limit", "ratio", &of(&|seconds| read.max(computed) / seconds)),
        ]
    }
}
