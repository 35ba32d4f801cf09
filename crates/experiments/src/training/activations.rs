//! `training activations`: steps under activation plans, measured and predicted.

use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress, Sink};

use super::activation_plan::{Outcome, Stack};

#[derive(clap::Args)]
pub(crate) struct ActivationsArgs {
    /// How large the stack is
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
}

const EXPERIMENT: &str = "activation-plan";
/// How often the layer is measured before each round: it is short beside a step.
const PROBES: usize = 5;

pub(crate) fn run(common: &CommonArgs, arguments: &ActivationsArgs) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    runtime::memory::track_cpu()?;
    let mut sink = Sink::new(common, crate::environment::of(device)?, arguments.scale)?;
    let seed = common.seed;
    let stack = |rows, length, hidden, layers| Stack {
        rows,
        length,
        hidden,
        heads: hidden / 64,
        layers,
        vocabulary: 256,
        dropout: 0.0,
        device,
        seed,
    };
    let (stack, rounds) = match arguments.scale {
        Scale::Smoke => (stack(2, 64, 128, 4), 2),
        Scale::Laptop => (stack(4, 256, 384, 6), 2),
        Scale::Full => (stack(4, 256, 384, 6), 4),
        Scale::Paper => (stack(8, 1024, 1024, 24), 5),
    };
    let probe = Progress::new(1);
    probe.message("activation plans, one layer");
    let predictor = stack.step_predictor(PROBES)?;
    drop(probe);
    let kept = predictor.layer.choices.first().map_or(0, |choice| choice.cost.held_bytes);
    for choice in &predictor.layer.choices {
        let cost = choice.cost;
        let freed = kept.saturating_sub(cost.held_bytes) as f64;
        let per_second = match freed / cost.recompute_seconds {
            rate if rate.is_finite() && rate > 0.0 => {
                Metric::exact("freed_per_recompute_second", "B/s", rate)
            }
            _ => Metric::not_measured(
                "freed_per_recompute_second",
                "B/s",
                "nothing is freed, or in no measurable time",
            ),
        };
        let metrics = vec![
            Metric::exact("freed_bytes", "B", freed),
            per_second,
            Metric::exact("held_bytes", "B", cost.held_bytes as f64),
            Metric::exact("transient_bytes", "B", cost.transient_bytes as f64),
            Metric::exact("host_bytes", "B", cost.host_bytes as f64),
            Metric::exact("recompute_seconds", "s", cost.recompute_seconds),
            Metric::exact("layer_seconds", "s", predictor.layer.seconds),
        ];
        sink.put(EXPERIMENT, &Case::new().with("layer", choice.of.name()), metrics)?;
    }

    let plans = stack.plans(&predictor)?;
    let bench = stack.bench(stack.layers)?;
    let mut progress = Progress::new((plans.len() * (rounds + 1)) as u64);
    let outcomes = bench.run(&stack, &predictor, plans, [rounds, PROBES], |name| {
        progress.message(&format!("activation plans, {name}"));
        progress.step();
    })?;
    for outcome in &outcomes {
        sink.put(EXPERIMENT, &Case::new().with("plan", outcome.plan.name.as_str()), metrics(outcome))?;
    }
    Ok(())
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
