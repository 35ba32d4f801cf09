//! `amp sweep`: static scales, and the dynamic scaler from very small and very large initial scales.

use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress, Sink};

use super::setup::{Scales, Setup};
use super::sizes::Sizes;
use super::training::{Outcome, Training, train};
use crate::corpus::DataArgs;

const EXPERIMENT: &str = "amp-sweep";
/// Exponents of the static scales.
const STATIC: [i32; 8] = [-8, -4, 0, 4, 8, 16, 20, 24];
/// Exponents from which the dynamic scale begins, and the steps after which it grows.
const DYNAMIC: [(i32, u32); 2] = [(-8, 1), (40, 10)];

#[derive(clap::Args)]
pub(crate) struct Sweep {
    /// How large
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
    #[command(flatten)]
    data: DataArgs,
}

pub(crate) fn run(common: &CommonArgs, arguments: &Sweep) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    let mut sink = Sink::new(common, crate::environment::of(device)?, arguments.scale)?;
    let sizes = Sizes::of(arguments.scale, device, common.seed);
    let corpus = sizes.corpus(&arguments.data.data, arguments.scale)?;
    corpus.put(&mut sink, EXPERIMENT, arguments.scale)?;
    let training = Training {
        steps: sizes.sweep_steps,
        evaluate_every: u64::MAX,
        scales: Scales::fitting(sizes.sweep_steps),
        ..sizes.training.clone()
    };
    let mut progress = Progress::new((STATIC.len() + DYNAMIC.len() + 1) as u64);
    progress.message("fp32");
    let full = train(&corpus, Setup::Fp32, &training)?;
    let Some(full) = full.last().map(|point| point.loss) else {
        anyhow::bail!("the training in fp32 diverged")
    };
    progress.step();
    // The losses with static scales.
    let mut of_static = Vec::new();
    for exponent in STATIC {
        progress.message(&format!("static, 2^{exponent}"));
        let scales = at(exponent, training.scales);
        let outcome = train(&corpus, Setup::Static, &Training { scales, ..training.clone() })?;
        of_static.extend(outcome.last().map(|last| (exponent, last.loss)));
        sink.put(EXPERIMENT, &case("static", exponent), metrics(&outcome, full))?;
        progress.step();
    }
    for (exponent, interval) in DYNAMIC {
        progress.message(&format!("dynamic, from 2^{exponent}"));
        let scales = Scales { short_interval: interval, ..at(exponent, training.scales) };
        let outcome = train(&corpus, Setup::Retry, &Training { scales, ..training.clone() })?;
        let mut metrics = metrics(&outcome, full);
        let same = of_static.iter().find(|(of, _)| *of == exponent);
        if let (Some(last), Some((_, loss))) = (outcome.last(), same) {
            metrics.push(Metric::exact("loss_vs_static", "ratio", last.loss / loss));
        }
        sink.put(EXPERIMENT, &case("dynamic, from here", exponent), metrics)?;
        progress.step();
    }
    Ok(())
}

fn case(scaler: &str, exponent: i32) -> Case {
    Case::new().with("scaler", scaler).with("log2_scale", exponent)
}

/// The constants with the middle scale at 2^`exponent`.
fn at(exponent: i32, scales: Scales) -> Scales {
    let [low, _, high] = scales.initial;
    Scales { initial: [low, 2f32.powi(exponent), high], ..scales }
}

fn metrics(outcome: &Outcome, full: f64) -> Vec<Metric> {
    let steps = outcome.steps.len().max(1) as f64;
    let mut metrics = match outcome.last() {
        Some(last) => vec![
            Metric::exact("final_loss", "nat", last.loss),
            Metric::exact("loss_vs_fp32", "ratio", last.loss / full),
        ],
        None => {
            let why = outcome.diverged.clone().unwrap_or_default();
            vec![
                Metric::not_measured("final_loss", "nat", &why),
                Metric::not_measured("loss_vs_fp32", "ratio", &why),
            ]
        }
    };
    metrics.push(Metric::exact("retries_per_step", "ratio", f64::from(outcome.retries()) / steps));
    metrics.push(Metric::exact("skipped_share", "ratio", outcome.skipped() as f64 / steps));
    let last = outcome.steps.last().map_or(f64::NAN, |step| step.scale.log2());
    if last.is_finite() {
        metrics.push(Metric::exact("final_log2_scale", "count", last));
    }
    metrics
}
