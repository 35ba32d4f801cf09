//! `amp sweep`: static scales, and the dynamic scaler from very small and very large initial scales.

use report::{Case, Metric};

use super::setup::{Scales, Setup};
use super::sizes::Sizes;
use super::training::{Outcome, Training, train};
use crate::corpus::DataArgs;
use crate::driver::Bench;

/// Exponents of the static scales.
const STATIC: [i32; 8] = [-8, -4, 0, 4, 8, 16, 20, 24];
/// Exponents from which the dynamic scale begins, and the steps after which it grows.
const DYNAMIC: [(i32, u32); 2] = [(-8, 1), (40, 10)];

pub(crate) fn run(bench: &mut Bench, data: &DataArgs) -> anyhow::Result<()> {
    let device = bench.device;
    let sizes = Sizes::new(bench.scale, device, bench.seed);
    let corpus = sizes.corpus(&data.data, bench.scale)?;
    corpus.put(bench)?;
    let training = Training {
        steps: sizes.sweep_steps,
        evaluate_every: u64::MAX,
        scales: Scales::fitting(sizes.sweep_steps),
        ..sizes.training.clone()
    };
    bench.message("fp32");
    let full = train(&corpus, Setup::Fp32, &training)?;
    let Some(full) = full.last().map(|point| point.loss) else {
        anyhow::bail!("the training in fp32 diverged")
    };
    // The losses with static scales.
    let mut fixed = Vec::new();
    let label = |exponent: &i32| format!("static, 2^{exponent}");
    bench.each(STATIC, label, |bench, exponent| {
        let scales = at(exponent, training.scales);
        let outcome = train(&corpus, Setup::Static, &Training { scales, ..training.clone() })?;
        fixed.extend(outcome.last().map(|last| (exponent, last.loss)));
        bench.put(&case("static", exponent), metrics(&outcome, full))
    })?;
    let label = |(exponent, _): &(i32, u32)| format!("dynamic, from 2^{exponent}");
    bench.each(DYNAMIC, label, |bench, (exponent, interval)| {
        let scales = Scales { short_interval: interval, ..at(exponent, training.scales) };
        let outcome = train(&corpus, Setup::Retry, &Training { scales, ..training.clone() })?;
        let mut metrics = metrics(&outcome, full);
        let same = fixed.iter().find(|(other, _)| *other == exponent);
        if let (Some(last), Some((_, loss))) = (outcome.last(), same) {
            metrics.push(Metric::exact("loss_vs_static", "ratio", last.loss / loss));
        }
        bench.put(&case("dynamic, from here", exponent), metrics)
    })
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
