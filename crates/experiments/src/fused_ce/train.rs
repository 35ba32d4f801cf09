//! `fused-ce train`: the same training with each loss.

use kernels::matmul::compute_kind;
use report::{Case, Metric};
use runtime::measure::Samples;
use tch::Kind;

use super::sizes;
use super::training::{Outcome, Training, Variant, train};
use crate::corpus::{Corpus, Limits};
use crate::driver::Bench;
use crate::dtype;

/// The tolerance for the loss of every step: rounding in another order changes losses by so much over a few dozen steps.
fn tolerance(kind: Kind) -> f64 {
    if kind == Kind::Float { 1e-4 } else { 1e-2 }
}

#[derive(clap::Args)]
pub(crate) struct Train {
    /// Rounds, each beginning with another variant
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Train) -> anyhow::Result<()> {
    let device = bench.device;
    runtime::memory::track_cpu()?;
    // The time of a dtype matters only if products in it are native.
    let native = |kind: &Kind| compute_kind(device, *kind) == *kind;
    let kinds: Vec<Kind> = sizes::kinds(bench.scale).iter().copied().filter(native).collect();
    for kind in sizes::kinds(bench.scale).iter().filter(|kind| !native(kind)) {
        let case = Case::new().with("loss", "frugal").with("dtype", dtype::name(*kind));
        let why = "this processor's products in it are computed in fp32";
        bench.put(&case, vec![Metric::not_measured("step_seconds", "s", why)])?;
    }
    for kind in kinds {
        let training = sizes::training(bench.scale, kind, device, bench.seed);
        compare(&training, arguments.rounds as usize, bench)?;
    }
    Ok(())
}

/// Trains with each loss in turns.
fn compare(training: &Training, rounds: usize, bench: &mut Bench) -> anyhow::Result<()> {
    let train_tokens = training.steps as usize * training.batch_size * training.sequence * 2;
    let limits =
        Limits { max_length: training.sequence, train_tokens, validation_tokens: 1000, vocabulary: 0 };
    let corpus = Corpus::embedded(&limits)?;
    let losses = Variant::ALL;
    let outcomes =
        bench.in_turns(rounds, &losses, Variant::to_string, |_, loss| train(&corpus, *loss, training))?;
    for (loss, trainings) in losses.iter().zip(&outcomes) {
        let case = Case::new().with("loss", loss.to_string()).with("dtype", dtype::name(training.kind));
        bench.put(&case, against(trainings, &outcomes[0], tolerance(training.kind)))?;
        for (step, loss) in trainings[0].losses.iter().enumerate() {
            let case = case.clone().with("step", step as u64 + 1);
            bench.put(&case, vec![Metric::exact("training_loss", "nat", *loss)])?;
        }
    }
    Ok(())
}

/// The figures of one loss over all rounds, beside the original one's.
fn against(outcomes: &[Outcome], original: &[Outcome], tolerance: f64) -> Vec<Metric> {
    let first = &outcomes[0];
    let differences = first.losses.iter().zip(&original[0].losses);
    let furthest = differences
        .map(|(loss, original)| (loss - original).abs() / original.abs() / tolerance)
        .fold(0.0, f64::max);
    let seconds: Vec<f64> = outcomes.iter().flat_map(|outcome| outcome.seconds.clone()).collect();
    let peaks: Vec<f64> = outcomes.iter().map(|outcome| outcome.peak_bytes as f64).collect();
    let ratios = |value: fn(&Outcome) -> f64| -> Vec<f64> {
        outcomes.iter().zip(original).map(|(outcome, original)| value(outcome) / value(original)).collect()
    };
    vec![
        Metric::exact("positions", "token", first.positions as f64),
        Metric::exact("final_loss", "exact", first.losses.last().copied().unwrap_or(f64::NAN)),
        Metric::exact("share_of_tolerance", "ratio", furthest),
        Metric::of_samples("step_seconds", "s", &seconds),
        Metric::of_samples("time_vs_original", "ratio", &ratios(|outcome| median(&outcome.seconds))),
        Metric::of_samples("peak_bytes", "B", &peaks),
        Metric::of_samples("peak_vs_original", "ratio", &ratios(|outcome| outcome.peak_bytes as f64)),
    ]
}

fn median(seconds: &[f64]) -> f64 {
    Samples { samples: seconds.to_vec() }.median()
}
