//! `swiglu-ckpt`: time and memory of each checkpoint level.

mod assignment;
pub mod bench;

use anyhow::{Context, bail};
use clap::Subcommand;
use report::{Case, Metric};
use runtime::measure::{MeasurementPlan, Samples};
use tch::{Device, Kind};

use bench::{Configuration, Gradients, Outcome, Variant};

use crate::driver::{Bench, Driver};
use crate::dtype;

/// The group of figures to measure.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Measure time and memory of training steps, level by level
    Bench(BenchArgs),
    /// Measure the assignment's five shapes at checkpoint levels 0 and 1
    Assignment,
}

#[derive(clap::Args)]
pub(crate) struct BenchArgs {
    /// Measure this configuration instead: BATCH,SEQ,HIDDEN,INTERMEDIATE,LAYERS (may be repeated)
    #[arg(long, value_name = "SIZES", value_parser = configuration)]
    config: Vec<Configuration>,
    /// Measure these only: operators, save-all, save-gate-up, save-one, input-only, input-only-tiled:BYTES
    #[arg(long, value_name = "LEVELS", value_delimiter = ',')]
    levels: Vec<Variant>,
    /// Largest number of measured steps of each case
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Seconds after which no further step of a case begins (two are measured in any case)
    #[arg(long, default_value_t = 3.0)]
    budget: f64,
    /// Skip cases whose predicted peak is above so many GiB [default: 80 % of what is free]
    #[arg(long, value_name = "GIB")]
    memory: Option<f64>,
    /// fp32, bf16 or fp16
    #[arg(long, default_value = "fp32", value_parser = dtype::parse)]
    dtype: Kind,
}

fn configuration(text: &str) -> Result<Configuration, String> {
    let sizes: Vec<i64> =
        text.split(',').map_while(|size| size.trim().parse().ok().filter(|&size| size > 0)).collect();
    match sizes[..] {
        [batch, seq, hidden, intermediate, layers] if text.split(',').count() == 5 => {
            Ok(Configuration { batch, seq, hidden, intermediate, layers })
        }
        _ => Err("expected five positive numbers: BATCH,SEQ,HIDDEN,INTERMEDIATE,LAYERS, for example 8,512,1024,4096,3".into()),
    }
}

impl Verb {
    pub(crate) fn run(&self, driver: &Driver) -> anyhow::Result<()> {
        match self {
            Self::Bench(arguments) => driver.run("swiglu", |bench| measure(bench, arguments)),
            Self::Assignment => driver.run("swiglu-assignment", assignment::run),
        }
    }
}

fn measure(bench: &mut Bench, arguments: &BenchArgs) -> anyhow::Result<()> {
    let (device, dtype) = (bench.device, arguments.dtype);
    runtime::memory::track_cpu()?;
    if !(arguments.budget.is_finite() && arguments.budget > 0.0) {
        bail!("--budget is {}; expected a positive number of seconds", arguments.budget);
    }
    let limit = match arguments.memory {
        Some(gib) => (gib * f64::from(1 << 30)) as u64,
        None => (runtime::device::memory_info(device)?.free as f64 * 0.8) as u64,
    };
    let usual = bench.sized([bench::SMOKE, bench::LAPTOP, bench::FULL, bench::PAPER]);
    let configurations = if arguments.config.is_empty() { usual } else { &arguments.config };
    let variants: Vec<Variant> =
        if arguments.levels.is_empty() { Variant::all().collect() } else { arguments.levels.clone() };
    let levels = |config| variants.iter().map(move |variant| (config, *variant));
    let label = |(config, variant): &(&Configuration, Variant)| format!("{} {variant}", config.name());
    // The machine's rate for the products of a configuration, measured once for each that fits.
    let mut rate: Option<(&Configuration, f64)> = None;
    bench.each(configurations.iter().flat_map(levels), label, |bench, (config, variant)| {
        // Inputs that are cast up take the bytes of fp32.
        let counted = if bench::is_predicted(variant, dtype, device) { dtype } else { Kind::Float };
        let needed = config.predict(variant, counted, Gradients::Freed)?.bytes;
        let metrics = if needed <= limit {
            let rate = match rate.filter(|(measured, _)| *measured == config) {
                Some((_, rate)) => rate,
                None => rate.insert((config, bench::product_rate(config, dtype, device)?)).1,
            };
            let plan = MeasurementPlan {
                warmup: 1,
                repeats: arguments.repeats as usize,
                min_repeats: 2,
                budget: Some(arguments.budget),
                ..MeasurementPlan::new(device)
            };
            let outcome = bench::measure(config, variant, dtype, Gradients::Freed, &plan)
                .with_context(|| format!("measuring {} {variant}", config.name()))?;
            metrics(config, variant, dtype, device, &outcome, rate)
        } else {
            let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
            let why = format!("needs {:.1} GiB of the {:.1} that may be used", gib(needed), gib(limit));
            vec![
                Metric::not_measured("step_seconds", "s", &why),
                Metric::not_measured("peak_bytes", "B", &why),
            ]
        };
        bench.put(&case(config, variant, bench.device_flag(), dtype), metrics)
    })
}

fn case(config: &Configuration, variant: Variant, device: &str, dtype: Kind) -> Case {
    let &Configuration { batch, seq, hidden, intermediate, layers } = config;
    Case::new()
        .with("device", device)
        .with("dtype", dtype::name(dtype))
        .with("config", config.name())
        .with("batch", batch)
        .with("seq", seq)
        .with("hidden", hidden)
        .with("intermediate", intermediate)
        .with("layers", layers)
        .with("level", variant.to_string())
}

fn metrics(
    config: &Configuration,
    variant: Variant,
    dtype: Kind,
    device: Device,
    outcome: &Outcome,
    limit: f64,
) -> Vec<Metric> {
    let Outcome { time, peak_bytes, held_bytes, predicted } = outcome;
    let phase = |name: &str| time.phase(name).map_or(&[][..], |Samples { samples }| samples);
    let (peak, expected) = (*peak_bytes as f64, predicted.bytes as f64);
    let rates: Vec<f64> = time.time.samples.iter().map(|seconds| config.flops() / seconds).collect();
    let shares: Vec<f64> = rates.iter().map(|rate| rate * variant.executed_share() / limit).collect();
    let prediction = |name, unit, value| {
        if bench::is_predicted(variant, dtype, device) {
            return Metric::exact(name, unit, value);
        }
        Metric::not_measured(name, unit, "the prediction is for dtypes that are computed in themselves")
    };
    vec![
        Metric::of_samples("forward_seconds", "s", phase("forward")),
        Metric::of_samples("backward_seconds", "s", phase("backward")),
        Metric::of_samples("step_seconds", "s", &time.time.samples),
        Metric::exact("peak_bytes", "B", peak),
        prediction("predicted_peak_bytes", "B", expected),
        prediction("prediction_error", "ratio", (expected - peak).abs() / peak),
        Metric::exact("peak_above_weights_bytes", "B", peak - predicted.weights as f64),
        Metric::exact("held_bytes", "B", *held_bytes as f64),
        Metric::exact(
            "held_beyond_inputs_bytes",
            "B",
            held_beyond_inputs(config, *held_bytes, dtype.elt_size_in_bytes()),
        ),
        Metric::of_samples("flop_rate", "FLOP/s", &rates),
        Metric::of_samples("share_of_matmul_rate", "ratio", &shares),
    ]
}

/// Bytes held between forward and backward that are not the input of a layer: 0 for the levels that keep the input.
fn held_beyond_inputs(config: &Configuration, held_bytes: u64, element_bytes: usize) -> f64 {
    let inputs = (config.layers - 1) * config.tokens() * config.hidden * element_bytes as i64;
    held_bytes as f64 - inputs as f64
}
