//! The assignment's table: five shapes at checkpoint levels 0 and 1, the mean of 15 steps after 2 of warm-up.

use anyhow::Context;
use report::cli::Scale;
use report::{Case, Metric};
use runtime::measure::{MeasurementPlan, Samples};
use swiglu_ckpt::CheckpointLevel;
use tch::Kind;

use super::bench::{self, Configuration, Gradients, Outcome, Variant};
use crate::driver::Bench;

/// A shape of the assignment, and its steps at each scale.
struct Shape {
    config: Configuration,
    /// Warm-up steps and measured steps at scale laptop; `None`: the shape takes too long there.
    laptop: Option<(usize, usize)>,
    /// Warm-up steps and measured steps at scale full.
    full: (usize, usize),
}

/// The assignment's own number of warm-up and measured steps.
const STEPS: (usize, usize) = (2, 15);

/// The assignment's shapes in its order. A step of the last is 24.7 TFLOP: minutes on two cores.
const SHAPES: [Shape; 5] = [
    shape([16, 128, 512, 2048, 2], Some((1, 5)), STEPS),
    shape([32, 128, 512, 2048, 2], Some((1, 3)), STEPS),
    shape([8, 512, 1024, 4096, 3], None, STEPS),
    shape([16, 512, 1024, 4096, 3], None, STEPS),
    shape([4, 1024, 4096, 16384, 5], None, (0, 2)),
];

const fn shape(
    [batch, seq, hidden, intermediate, layers]: [i64; 5],
    laptop: Option<(usize, usize)>,
    full: (usize, usize),
) -> Shape {
    Shape { config: Configuration { batch, seq, hidden, intermediate, layers }, laptop, full }
}

impl Shape {
    /// Warm-up steps and measured steps at `scale`.
    fn steps(&self, scale: Scale) -> Option<(usize, usize)> {
        match scale {
            Scale::Smoke => (self.config.tokens() <= 2048).then_some((0, 1)),
            Scale::Laptop => self.laptop,
            Scale::Full => Some(self.full),
            Scale::Paper => Some(STEPS),
        }
    }
}

/// The assignment's level of each variant.
const LEVELS: [(i64, Variant); 2] =
    [(0, Variant::Level(CheckpointLevel::SaveAll)), (1, Variant::Level(CheckpointLevel::InputOnly))];

/// Measures the ten rows.
pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    let (device, scale) = (bench.device, bench.scale);
    runtime::memory::track_cpu()?;
    bench.expect(SHAPES.len() * LEVELS.len());
    let mut changes = Changes::default();
    for shape in &SHAPES {
        let mut keeping_all: Option<Outcome> = None;
        for (level, variant) in LEVELS {
            let config = &shape.config;
            bench.message(&format!("{} level {level}", config.name()));
            let needed = config.predict(variant, Kind::Float, Gradients::Accumulated)?.bytes;
            let free = runtime::device::memory_info(device)?.free;
            let metrics = match shape.steps(scale) {
                None => not_measured(&format!(
                    "takes too long at scale {}; `--scale full` measures it",
                    scale.name()
                )),
                Some(_) if needed > free => {
                    not_measured(&format!("needs {:.1} GiB; {:.1} GiB are free", gib(needed), gib(free)))
                }
                Some((warmup, repeats)) => {
                    let plan =
                        MeasurementPlan { warmup, repeats, min_repeats: 1, ..MeasurementPlan::new(device) };
                    let outcome = bench::measure(config, variant, Kind::Float, Gradients::Accumulated, &plan)
                        .with_context(|| format!("measuring {} level {level}", config.name()))?;
                    let mut metrics = measured(config, variant, &outcome);
                    match &keeping_all {
                        None => keeping_all = Some(outcome),
                        Some(keeping_all) => metrics.extend(changes.add(keeping_all, &outcome)),
                    }
                    metrics
                }
            };
            bench.put(&case(config, level), metrics)?;
            bench.step();
        }
    }
    bench.put(&Case::new().with("config", "all measured shapes"), changes.ranges())
}

/// Changes from level 0 to level 1, in percent, over the shapes.
#[derive(Default)]
struct Changes {
    backward: Vec<f64>,
    step: Vec<f64>,
    peak: Vec<f64>,
}

impl Changes {
    /// Adds one shape, and returns its changes.
    fn add(&mut self, keeping: &Outcome, recomputing: &Outcome) -> Vec<Metric> {
        let percent = |new: f64, old: f64| 100.0 * (new / old - 1.0);
        let backward = |outcome: &Outcome| average(phase(outcome, "backward"));
        let changes = [
            percent(backward(recomputing), backward(keeping)),
            percent(average(&recomputing.time.time.samples), average(&keeping.time.time.samples)),
            percent(recomputing.peak_bytes as f64, keeping.peak_bytes as f64),
        ];
        for (all, change) in [&mut self.backward, &mut self.step, &mut self.peak].into_iter().zip(changes) {
            all.push(change);
        }
        let names = ["backward_time_change", "step_time_change", "peak_change"];
        names.iter().zip(changes).map(|(name, change)| Metric::exact(name, "%", change)).collect()
    }

    /// The smallest and the largest change of each kind.
    fn ranges(&self) -> Vec<Metric> {
        let range = |name: &str, changes: &[f64]| {
            let (least, most) = changes
                .iter()
                .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), &c| (least.min(c), most.max(c)));
            [(format!("least_{name}"), least), (format!("most_{name}"), most)].map(|(name, value)| {
                if value.is_finite() {
                    Metric::exact(&name, "%", value)
                } else {
                    Metric::not_measured(&name, "%", "no shape was measured")
                }
            })
        };
        let kinds = [
            ("backward_time_change", &self.backward),
            ("step_time_change", &self.step),
            ("peak_change", &self.peak),
        ];
        kinds.into_iter().flat_map(|(name, changes)| range(name, changes)).collect()
    }
}

/// Seconds of a phase of each step.
fn phase<'a>(outcome: &'a Outcome, name: &str) -> &'a [f64] {
    outcome.time.phase(name).map_or(&[][..], |Samples { samples }| samples)
}

/// The mean of the samples.
fn average(samples: &[f64]) -> f64 {
    samples.iter().sum::<f64>() / samples.len() as f64
}

/// The assignment's columns.
fn case(config: &Configuration, level: i64) -> Case {
    Case::new()
        .with("config", config.name())
        .with("batch_size", config.batch)
        .with("seq_len", config.seq)
        .with("hidden_dim", config.hidden)
        .with("intermediate_size", config.intermediate)
        .with("num_layers", config.layers)
        .with("checkpoint_level", level)
}

fn not_measured(why: &str) -> Vec<Metric> {
    [("forward_seconds", "s"), ("backward_seconds", "s"), ("step_seconds", "s"), ("peak_memory", "GiB")]
        .map(|(name, unit)| Metric::not_measured(name, unit, why))
        .into()
}

fn measured(config: &Configuration, variant: Variant, outcome: &Outcome) -> Vec<Metric> {
    let steps = &outcome.time.time.samples;
    let rates: Vec<f64> =
        steps.iter().map(|seconds| config.flops() * variant.executed_share() / seconds).collect();
    vec![
        mean("forward_seconds", "s", phase(outcome, "forward")),
        mean("backward_seconds", "s", phase(outcome, "backward")),
        mean("step_seconds", "s", steps),
        Metric::exact("peak_memory", "GiB", gib(outcome.peak_bytes)),
        Metric::exact("predicted_peak_memory", "GiB", gib(outcome.predicted.bytes)),
        mean("executed_flop_rate", "FLOP/s", &rates),
        Metric::exact("steps", "count", steps.len() as f64),
    ]
}

/// The assignment divides by 1024³ and writes Gb.
fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// The mean of the samples with their standard deviation, as the assignment asks.
fn mean(name: &str, unit: &str, samples: &[f64]) -> Metric {
    let mean = average(samples);
    let variance = average(&samples.iter().map(|sample| (sample - mean).powi(2)).collect::<Vec<f64>>());
    Metric {
        spread: (samples.len() > 1).then(|| variance.sqrt()),
        n: samples.len(),
        ..Metric::exact(name, unit, mean)
    }
}
