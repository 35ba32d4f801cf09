//! `fused-ce bench`: time and memory of one forward and backward.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use anyhow::{Context, bail};
use fused_ce::Chunk;
use report::cli::Scale;
use report::{Case, Metric};
use runtime::measure::{MeasurementPlan, Samples};
use tch::Device;

use super::baselines::Implementation;
use super::shapes::{self, Outcome, Shape, Tensors};
use crate::driver::Bench;
use crate::dtype;

#[derive(clap::Args)]
pub(crate) struct BenchArgs {
    /// Measure this shape instead: TOKENS,HIDDEN,VOCABULARY[,float32|bfloat16|float16[,SHARE IGNORE_INDEX]] (may be repeated)
    #[arg(long, value_name = "SHAPE")]
    case: Vec<Shape>,
    /// Measure a length and eight times as many tokens instead
    #[arg(long, conflicts_with = "case")]
    long: bool,
    /// Measure these only: naive, chunked-recompute, grad-in-forward, linear-cross-entropy, linear-cross-entropy-rounded,
    /// linear-cross-entropy-rounded-logits
    #[arg(long, value_name = "METHODS", value_delimiter = ',')]
    methods: Vec<Implementation>,
    /// Bytes of logits that exist at a time, for all methods but the first [default: each method's own]
    #[arg(long, value_name = "BYTES")]
    chunk_bytes: Option<u64>,
    /// Largest number of measured steps of each case
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Steps before the measured ones
    #[arg(long, default_value_t = 1)]
    warmup: u32,
    /// Seconds after which no further step of a case begins (one is measured in any case)
    #[arg(long, default_value_t = 2.0)]
    budget: f64,
}

pub(crate) fn run(bench: &mut Bench, arguments: &BenchArgs) -> anyhow::Result<()> {
    let device = bench.device;
    runtime::memory::track_cpu()?;
    if !(arguments.budget.is_finite() && arguments.budget > 0.0) {
        bail!("--budget is {}; expected a positive number of seconds", arguments.budget);
    }
    let shapes = match (&arguments.case[..], bench.scale) {
        ([], Scale::Smoke) if arguments.long => shapes::LONG_SMOKE,
        ([], _) if arguments.long => shapes::LONG,
        ([], Scale::Smoke) => shapes::SMOKE,
        ([], Scale::Laptop) => shapes::LAPTOP,
        ([], Scale::Full) => shapes::FULL,
        ([], Scale::Paper) => shapes::PAPER,
        (given, _) => given,
    };
    let mut implementations = arguments.methods.clone();
    if implementations.is_empty() {
        implementations.extend(Implementation::ALL);
        implementations.retain(|one| *one != Implementation::RoundedLogits || device.is_cuda());
    }
    let plan = MeasurementPlan {
        warmup: arguments.warmup as usize,
        repeats: arguments.repeats as usize,
        min_repeats: 1,
        budget: Some(arguments.budget),
        ..MeasurementPlan::new(device)
    };
    let chunk = arguments.chunk_bytes.map(Chunk::Budget);
    let mut first = HashMap::new();
    bench.expect_turns(shapes.len());
    bench.each(
        shapes,
        |shape| shape.to_string(),
        |bench, shape| {
            let free = runtime::device::memory_info(device)?.free;
            let tensors = Tensors::new(shape, bench.seed, device)?;
            let (mut limit, mut round) = (None, 0);
            bench.rounds(|bench| {
                // Measured in this program's turn, when no other computes.
                let limit = match limit {
                    Some(limit) => limit,
                    None => *limit.insert(shapes::product_rate(shape, device)?),
                };
                for implementation in &implementations {
                    bench.message(&format!("{shape} {implementation}"));
                    let metrics = if *implementation == Implementation::Naive
                        && shape.naive_bytes() as f64 > 0.9 * free as f64
                    {
                        too_large(shape.naive_bytes(), free)
                    } else {
                        let outcome = shapes::measure(shape, &tensors, *implementation, chunk, &plan)
                            .with_context(|| format!("measuring {shape} {implementation}"))?;
                        let mut metrics = metrics(shape, *implementation, &outcome, limit);
                        let first = first.entry((round, implementation.name()));
                        metrics.extend(against_first(shape, &outcome, first));
                        metrics
                    };
                    bench.put(&case(shape, *implementation, device), metrics)?;
                }
                round += 1;
                Ok(())
            })
        },
    )
}

/// The metrics of an implementation that needs more bytes than are free.
fn too_large(bytes: u64, free: u64) -> Vec<Metric> {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let why = format!("needs {:.1} GiB of the {:.1} that are free", gib(bytes), gib(free));
    ["step_seconds", "peak_above_bytes"]
        .into_iter()
        .zip(["s", "B"])
        .map(|(name, unit)| Metric::not_measured(name, unit, &why))
        .collect()
}

fn case(shape: &Shape, implementation: Implementation, device: Device) -> Case {
    Case::new()
        .with("device", if device == Device::Cpu { "cpu" } else { "cuda" })
        .with("method", implementation.name())
        .with("dtype", dtype::name(shape.kind))
        .with("tokens", shape.tokens)
        .with("hidden", shape.hidden)
        .with("vocabulary", shape.vocabulary)
        .with("ignored", shape.ignored)
}

fn metrics(shape: &Shape, implementation: Implementation, outcome: &Outcome, limit: f64) -> Vec<Metric> {
    let phase = |name: &str| outcome.time.phase(name).map_or(&[][..], |Samples { samples }| samples);
    let seconds = &outcome.time.time.samples;
    let rates: Vec<f64> = seconds.iter().map(|seconds| shape.flops() / seconds).collect();
    // Products that run: four where logits are computed again, and those of ignored rows where these are not dropped.
    let products = if implementation == Implementation::ChunkedRecompute { 4.0 / 3.0 } else { 1.0 };
    let dropped = implementation.options().is_some();
    let rows = if dropped { 1.0 } else { shape.tokens as f64 / shape.labelled() as f64 };
    let shares: Vec<f64> = rates.iter().map(|rate| rate * products * rows / limit).collect();
    vec![
        Metric::of_samples("forward_seconds", "s", phase("forward")),
        Metric::of_samples("backward_seconds", "s", phase("backward")),
        Metric::of_samples("step_seconds", "s", seconds),
        Metric::exact("peak_above_bytes", "B", outcome.peak_above_bytes as f64),
        Metric::of_samples("flop_rate", "FLOP/s", &rates),
        Metric::of_samples("share_of_matmul_rate", "ratio", &shares),
    ]
}

/// Time for each token with a label, and the peak, over those of the implementation's first shape in the same round: what more tokens cost.
fn against_first<K>(shape: &Shape, outcome: &Outcome, first: Entry<'_, K, (f64, f64)>) -> Vec<Metric> {
    let this =
        (outcome.time.time.median() / shape.labelled().max(1) as f64, outcome.peak_above_bytes.max(1) as f64);
    let (seconds, peak) = *first.or_insert(this);
    vec![
        Metric::exact("time_per_token_vs_first", "ratio", this.0 / seconds),
        Metric::exact("peak_vs_first", "ratio", this.1 / peak),
    ]
}
