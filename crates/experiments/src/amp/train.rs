//! `amp train`: whole trainings, one in each precision.

use report::{Case, Metric};

use super::setup::Setup;
use super::sizes::Sizes;
use super::training::{Outcome, Training, train};
use crate::corpus::DataArgs;
use crate::driver::Bench;

/// Points of a training curve.
const POINTS: usize = 50;

#[derive(clap::Args)]
pub(crate) struct Train {
    #[command(flatten)]
    data: DataArgs,
    /// These set-ups only; fp32, which they are compared with, is trained in any case
    #[arg(long, value_enum, value_delimiter = ',')]
    setups: Vec<Setup>,
    /// Trainings in each set-up, each from another seed [default: 1, 3 at full and paper]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: Option<u64>,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Train) -> anyhow::Result<()> {
    let device = bench.device;
    runtime::memory::track_cpu()?;
    let sizes = Sizes::new(bench.scale, device, bench.seed);
    let corpus = sizes.corpus(&arguments.data.data, bench.scale)?;
    corpus.put(bench)?;
    let unigram = corpus.unigram_loss()?;
    let mut setups = vec![Setup::Fp32];
    let chosen = if arguments.setups.is_empty() { &Setup::ALL[..] } else { &arguments.setups };
    setups.extend(chosen.iter().filter(|setup| **setup != Setup::Fp32));
    let rounds = arguments.rounds.unwrap_or(sizes.rounds) as usize;
    bench.message("warm-up");
    // The first training of a process sets libtorch up and lets the allocator grow; it is not among those measured.
    train(&corpus, Setup::Fp32, &Training { steps: 10, ..sizes.training.clone() })?;
    let seed = bench.seed;
    let outcomes = bench.in_turns(rounds, &setups, Setup::to_string, |round, setup| {
        train(&corpus, *setup, &Training { seed: seed + round as u64, ..sizes.training.clone() })
    })?;
    for (&setup, trainings) in setups.iter().zip(&outcomes) {
        let case = Case::new().with("setup", setup.to_string());
        let mut metrics = totals(trainings, &outcomes[0], unigram);
        if let Some(seconds) = metrics.iter_mut().find(|metric| metric.name == "gradient_seconds") {
            seconds.note = Some(format!("products: {}", setup.products(device)));
        }
        bench.put(&case, metrics)?;
        curves(bench, &case, &trainings[0])?;
    }
    against_static(bench, &setups, &outcomes)
}

/// The figures of one set-up over all rounds.
fn totals(outcomes: &[Outcome], full: &[Outcome], unigram: f64) -> Vec<Metric> {
    let all = |values: &dyn Fn(&Outcome) -> Vec<f64>| outcomes.iter().flat_map(values).collect::<Vec<f64>>();
    let each = |name: &str, unit: &str, value: &dyn Fn(&Outcome) -> f64| {
        Metric::of_samples(name, unit, &outcomes.iter().map(value).collect::<Vec<f64>>())
    };
    let finals = |name: &str, unit: &str, values: Vec<Option<f64>>| {
        let why = outcomes.iter().find_map(|outcome| outcome.diverged.clone());
        match values.into_iter().collect::<Option<Vec<f64>>>() {
            Some(values) => Metric::of_samples(name, unit, &values),
            None => Metric::not_measured(name, unit, &format!("diverged: {}", why.unwrap_or_default())),
        }
    };
    let last = |value: fn(&Outcome) -> Option<f64>| outcomes.iter().map(value).collect::<Vec<_>>();
    let against =
        outcomes.iter().zip(full).map(|(low, full)| Some(low.last()?.loss / full.last()?.loss)).collect();
    let last_vs_unigram = outcomes.iter().map(|outcome| Some(outcome.last()?.loss / unigram)).collect();
    let mut metrics = vec![
        finals("final_loss", "nat", last(|outcome| Some(outcome.last()?.loss))),
        finals("final_accuracy", "ratio", last(|outcome| Some(outcome.last()?.accuracy))),
        finals("loss_vs_fp32", "ratio", against),
        finals("loss_vs_unigram", "ratio", last_vs_unigram),
        each("diverged", "count", &|outcome| f64::from(u8::from(outcome.diverged.is_some()))),
        Metric::of_samples("gradient_seconds", "s", &all(&Outcome::gradient_seconds)),
        Metric::of_samples("optimizer_seconds", "s", &all(&Outcome::optimizer_seconds)),
        each("peak_bytes", "B", &|outcome| outcome.peak_bytes as f64),
        each("steps", "count", &|outcome| outcome.steps.len() as f64),
        each("skipped_steps", "count", &|outcome| outcome.skipped() as f64),
        each("skipped_share", "ratio", &|outcome| {
            outcome.skipped() as f64 / outcome.steps.len().max(1) as f64
        }),
        each("scale_changes", "count", &|outcome| outcome.scale_changes() as f64),
        each("retries", "count", &|outcome| outcome.retries().into()),
        each("final_scale", "ratio", &|outcome| outcome.steps.last().map_or(1.0, |step| step.scale)),
    ];
    if outcomes.iter().all(|outcome| outcome.casts.is_some()) {
        let casts = |counter: fn(amp::CastStatistics) -> u64| {
            move |outcome: &Outcome| {
                outcome.casts.map_or(0.0, |casts| counter(casts) as f64 / outcome.steps.len().max(1) as f64)
            }
        };
        metrics.push(each("cast_hits_per_step", "count", &casts(|casts| casts.hits)));
        metrics.push(each("casts_per_step", "count", &casts(|casts| casts.misses)));
        metrics.push(each("cast_bytes", "B", &|outcome| {
            outcome.casts.map_or(0.0, |casts| casts.peak_bytes as f64)
        }));
    }
    metrics
}

/// Curves of a training, step by step.
fn curves(bench: &mut Bench, case: &Case, outcome: &Outcome) -> anyhow::Result<()> {
    for point in &outcome.curve {
        let metrics = vec![
            Metric::exact("validation_loss", "nat", point.loss),
            Metric::exact("validation_accuracy", "ratio", point.accuracy),
        ];
        if point.loss.is_finite() {
            bench.put(&case.clone().with("step", point.step), metrics)?;
        }
    }
    // A curve has as many points as a reader can distinguish.
    let stretch = outcome.steps.len().div_ceil(POINTS).max(1);
    for steps in outcome.steps.chunks(stretch) {
        let last = &steps[steps.len() - 1];
        let mut metrics = vec![Metric::exact("scale", "ratio", last.scale)];
        let loss = steps.iter().map(|step| step.loss).sum::<f64>() / steps.len() as f64;
        if loss.is_finite() {
            metrics.push(Metric::exact("training_loss", "nat", loss));
        }
        bench.put(&case.clone().with("step", last.step), metrics)?;
    }
    Ok(())
}

/// The dynamic scalers' losses over that of the static scaler with the same initial scale, seed by seed.
fn against_static(bench: &mut Bench, setups: &[Setup], outcomes: &[Vec<Outcome>]) -> anyhow::Result<()> {
    let outcome = |wanted| setups.iter().position(|setup| *setup == wanted).map(|index| &outcomes[index]);
    for (setup, fixed) in Setup::DYNAMIC {
        let (Some(dynamic), Some(fixed)) = (outcome(setup), outcome(fixed)) else { continue };
        let pairs = dynamic.iter().zip(fixed);
        let ratios: Option<Vec<f64>> =
            pairs.map(|(dynamic, fixed)| Some(dynamic.last()?.loss / fixed.last()?.loss)).collect();
        let metric = match ratios {
            Some(ratios) => Metric::of_samples("loss_vs_static", "ratio", &ratios),
            None => Metric::not_measured("loss_vs_static", "ratio", "one of the two diverged"),
        };
        bench.put(&Case::new().with("setup", setup.to_string()), vec![metric])?;
    }
    Ok(())
}
