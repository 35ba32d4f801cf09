//! `fused-ce train`: the same training with each loss.

use kernels::matmul::compute_kind;
use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress, Sink};
use runtime::measure::Samples;
use tch::Kind;

use super::sizes;
use super::training::{Outcome, Training, Variant, train};
use crate::corpus::{Corpus, Limits};
use crate::dtype;

const EXPERIMENT: &str = "fused-ce-training";
/// Of the loss, at every step: what rounding in another order may make of the losses over a few dozen steps.
fn tolerance(kind: Kind) -> f64 {
    if kind == Kind::Float { 1e-4 } else { 1e-2 }
}

#[derive(clap::Args)]
pub(crate) struct Train {
    /// How large
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
    /// Rounds, each beginning with another variant
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

pub(crate) fn run(common: &CommonArgs, arguments: &Train) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    runtime::memory::track_cpu()?;
    let mut sink = Sink::new(common, crate::environment::of(device)?, arguments.scale)?;
    // The time of a dtype says something only where products in it are native.
    let native = |kind: &Kind| compute_kind(device, *kind) == *kind;
    let kinds: Vec<Kind> = sizes::kinds(arguments.scale).iter().copied().filter(native).collect();
    let turns = u64::from(arguments.rounds) * (Variant::ALL.len() * kinds.len()) as u64;
    let mut progress = Progress::new(turns);
    for kind in sizes::kinds(arguments.scale).iter().filter(|kind| !native(kind)) {
        let case = Case::new().with("loss", "frugal").with("dtype", dtype::name(*kind));
        let why = "this processor's products in it are computed in fp32";
        sink.put(EXPERIMENT, &case, vec![Metric::not_measured("step_seconds", "s", why)])?;
    }
    for kind in kinds {
        let training = sizes::training(arguments.scale, kind, device, common.seed);
        compare(&training, arguments.rounds, &mut progress, &mut sink)?;
    }
    Ok(())
}

/// Trains with each loss in turns.
fn compare(training: &Training, rounds: u32, progress: &mut Progress, sink: &mut Sink) -> anyhow::Result<()> {
    let train_tokens = training.steps as usize * training.batch_size * training.sequence * 2;
    let limits =
        Limits { max_length: training.sequence, train_tokens, validation_tokens: 1000, vocabulary: 0 };
    let corpus = Corpus::embedded(&limits)?;
    let mut outcomes = vec![Vec::new(); Variant::ALL.len()];
    for round in 0..rounds as usize {
        for turn in 0..Variant::ALL.len() {
            let index = (turn + round) % Variant::ALL.len();
            progress.message(&format!("{}, round {}", Variant::ALL[index], round + 1));
            outcomes[index].push(train(&corpus, Variant::ALL[index], training)?);
            progress.step();
        }
    }
    for (variant, of_variant) in Variant::ALL.iter().zip(&outcomes) {
        let case = Case::new().with("loss", variant.to_string()).with("dtype", dtype::name(training.kind));
        let original: &Outcome = &outcomes[0][0];
        let furthest = of_variant[0]
            .losses
            .iter()
            .zip(&original.losses)
            .map(|(own, original)| (own - original).abs() / original.abs() / tolerance(training.kind));
        let furthest = furthest.fold(0.0, f64::max);
        let seconds: Vec<f64> = of_variant.iter().flat_map(|outcome| outcome.seconds.clone()).collect();
        let ratios: Vec<f64> = of_variant
            .iter()
            .zip(&outcomes[0])
            .map(|(own, original)| median(&own.seconds) / median(&original.seconds))
            .collect();
        let peaks: Vec<f64> = of_variant.iter().map(|outcome| outcome.peak_bytes as f64).collect();
        let peak_ratios: Vec<f64> =
            peaks.iter().zip(&outcomes[0]).map(|(own, original)| own / original.peak_bytes as f64).collect();
        let last = of_variant[0].losses.last().copied().unwrap_or(f64::NAN);
        sink.put(
            EXPERIMENT,
            &case,
            vec![
                Metric::exact("positions", "token", of_variant[0].positions as f64),
                Metric::exact("final_loss", "exact", last),
                Metric::exact("share_of_tolerance", "ratio", furthest),
                Metric::of_samples("step_seconds", "s", &seconds),
                Metric::of_samples("time_vs_original", "ratio", &ratios),
                Metric::of_samples("peak_bytes", "B", &peaks),
                Metric::of_samples("peak_vs_original", "ratio", &peak_ratios),
            ],
        )?;
        for (step, loss) in of_variant[0].losses.iter().enumerate() {
            let case = case.clone().with("step", step as u64 + 1);
            sink.put(EXPERIMENT, &case, vec![Metric::exact("training_loss", "nat", *loss)])?;
        }
    }
    Ok(())
}

fn median(seconds: &[f64]) -> f64 {
    Samples { samples: seconds.to_vec() }.median()
}
