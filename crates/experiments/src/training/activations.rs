//! `training activations`: steps under activation plans, measured and predicted.

use report::{Case, Metric};
use training::activations::StepPredictor;

use super::activation_plan::{Outcome, Stack};
use crate::driver::Bench;

/// How often the layer is measured before each round: it is short beside a step.
const PROBES: usize = 5;

pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    let device = bench.device;
    runtime::memory::track_cpu()?;
    let ([rows, length, hidden, layers], rounds) = bench.sized([
        ([2, 64, 128, 4], 2),
        ([4, 256, 384, 6], 2),
        ([4, 256, 384, 6], 4),
        ([8, 1024, 1024, 24], 5),
    ]);
    let stack = Stack {
        rows,
        length,
        hidden,
        heads: hidden / 64,
        layers,
        vocabulary: 256,
        dropout: 0.0,
        device,
        seed: bench.seed,
    };
    bench.message("activation plans, one layer");
    let predictor = stack.step_predictor(PROBES)?;
    for (index, choice) in predictor.layer.choices.iter().enumerate() {
        bench.put(&Case::new().with("layer", choice.of.name()), layer_metrics(&predictor, index))?;
    }

    let plans = stack.plans(&predictor)?;
    let model = stack.bench(stack.layers)?;
    bench.expect(plans.len() * (rounds + 1));
    let outcomes = model.run(&stack, &predictor, plans, [rounds, PROBES], |name| {
        bench.message(&format!("activation plans, {name}"));
        bench.step();
    })?;
    for outcome in &outcomes {
        bench.put(&Case::new().with("plan", outcome.plan.name.as_str()), metrics(outcome))?;
    }
    Ok(())
}

/// Bytes that a layer keeps and time that it recomputes under a plan; the first plan keeps everything.
fn layer_metrics(predictor: &StepPredictor, plan: usize) -> Vec<Metric> {
    let choices = &predictor.layer.choices;
    let (kept, cost) = (choices[0].cost.held_bytes, choices[plan].cost);
    let freed = kept.saturating_sub(cost.held_bytes) as f64;
    let rate = freed / cost.recompute_seconds;
    let per_second = if rate.is_finite() && rate > 0.0 {
        Metric::exact("freed_per_recompute_second", "B/s", rate)
    } else {
        let why = "nothing is freed, or in no measurable time";
        Metric::not_measured("freed_per_recompute_second", "B/s", why)
    };
    vec![
        Metric::exact("freed_bytes", "B", freed),
        per_second,
        Metric::exact("held_bytes", "B", cost.held_bytes as f64),
        Metric::exact("transient_bytes", "B", cost.transient_bytes as f64),
        Metric::exact("host_bytes", "B", cost.host_bytes as f64),
        Metric::exact("recompute_seconds", "s", cost.recompute_seconds),
        Metric::exact("layer_seconds", "s", predictor.layer.seconds),
    ]
}

fn metrics(outcome: &Outcome) -> Vec<Metric> {
    let Outcome { plan, predictor, predicted_seconds, peak_bytes, host_bytes, seconds } = outcome;
    let step = Metric::of_samples("step_seconds", "s", seconds);
    let predicted = Metric::of_samples("predicted_step_seconds", "s", predicted_seconds);
    let bytes_error = (predictor.peak_bytes as f64 / *peak_bytes as f64 - 1.0).abs();
    let ratio = predicted.value.zip(step.value).map(|(predicted, measured)| predicted / measured);
    let time_error = ratio.map_or(f64::NAN, |ratio| (ratio - 1.0).abs());
    let mut metrics = vec![
        Metric::exact("peak_bytes", "B", *peak_bytes as f64),
        Metric::exact("predicted_peak_bytes", "B", predictor.peak_bytes as f64),
        Metric::exact("prediction_error", "ratio", bytes_error),
        Metric::exact("host_bytes", "B", *host_bytes as f64),
        step,
        predicted,
        Metric::exact("time_error", "ratio", time_error),
    ];
    if let Some(budget) = plan.budget {
        metrics.push(Metric::exact("budget_bytes", "B", budget as f64));
        metrics.push(Metric::exact("budget_used", "ratio", *peak_bytes as f64 / budget as f64));
    }
    metrics
}
