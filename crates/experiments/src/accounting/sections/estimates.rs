//! Memory budgets in series: each varies one choice and keeps the others.

use accounting::decoder_flops::{Recomputation, Workload};
use accounting::estimate::{Estimate, Part, TrainingPlan, estimate};
use accounting::memory::logits::Loss;
use accounting::memory::optimizer::Optimizer;
use accounting::memory::recipe::Recipe;
use accounting::memory::zero::{Sharding, ZeroStage};
use accounting::recompute::{AttentionKernel, Recompute, SwigluLevel};
use accounting::{Error, presets};
use report::{Case, Environment, Metric, Record};

use super::record;

/// A series' name, its model, and its steps.
type Series = (&'static str, &'static str, Vec<(String, TrainingPlan)>);

/// The budget at the peak of each step of each series.
pub(crate) fn estimates(environment: &Environment) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    for (series, name, steps) in all_series()? {
        let model = presets::find(name)?;
        for (step, plan) in steps {
            let case = Case::new()
                .with("varied", series)
                .with("model", name)
                .with("batch", plan.work.batch)
                .with("sequence", plan.work.sequence)
                .with("step", step);
            let metrics = metrics(&estimate(&model, &plan)?);
            records.extend(
                metrics.into_iter().map(|metric| record("accounting-estimate", &case, metric, environment)),
            );
        }
    }
    Ok(records)
}

/// The metric of each part at the peak, `<part>_bytes`, and `peak_bytes` with the moment in its note.
pub(crate) fn metrics(estimate: &Estimate) -> Vec<Metric> {
    let peak = estimate.peak();
    let name = |part: Part| format!("{}_bytes", part.name().replace(' ', "_"));
    let mut metrics: Vec<Metric> =
        Part::ALL.into_iter().map(|part| Metric::exact(&name(part), "B", peak.bytes(part) as f64)).collect();
    let mut total = Metric::exact("peak_bytes", "B", peak.total as f64);
    total.note = Some(format!("at the {}", peak.moment.name()));
    metrics.push(total);
    metrics
}

fn all_series() -> Result<[Series; 4], Error> {
    // Gradients of earlier batches and a loss in chunks: the model states are what these series are about.
    let small = TrainingPlan {
        work: Workload { batch: 8, sequence: 1024 },
        loss: Loss::LinearCrossEntropy { tokens: 1024, whole: 0 },
        accumulate: true,
        ..TrainingPlan::default()
    };
    let large = TrainingPlan { work: Workload { batch: 4, sequence: 4096 }, ..TrainingPlan::default() };
    let recipes = Recipe::ALL.map(|recipe| (recipe.name.to_owned(), TrainingPlan { recipe, ..small }));
    let optimizers =
        Optimizer::ALL.map(|optimizer| (optimizer.name().to_owned(), TrainingPlan { optimizer, ..small }));
    let mut zero = Vec::new();
    for stage in ZeroStage::ALL {
        let plan = TrainingPlan {
            work: Workload { batch: 1, sequence: 4096 },
            sharding: Sharding::new(stage, 8)?,
            ..small
        };
        zero.push((format!("ZeRO-{}", stage.number()), plan));
    }
    Ok([
        ("recipe", "qwen2.5-0.5b", recipes.into()),
        ("optimizer", "qwen2.5-0.5b", optimizers.into()),
        ("recomputation", "qwen2.5-0.5b", recomputation(large)),
        ("zero", "llama-3-8b", zero),
    ])
}

/// From keeping everything to keeping as little as possible.
fn recomputation(plan: TrainingPlan) -> Vec<(String, TrainingPlan)> {
    let with = |recomputation, loss| TrainingPlan { recomputation, loss, ..plan };
    let eager = Recomputation { attention: AttentionKernel::Eager, ..Recomputation::default() };
    let flash = Recomputation::default();
    let level = |swiglu| Recomputation { swiglu, ..flash };
    let full = Recomputation { checkpoint: Recompute::Full, ..flash };
    vec![
        ("eager attention".into(), with(eager, Loss::Eager)),
        (
            "selective recomputation".into(),
            with(Recomputation { checkpoint: Recompute::Selective, ..eager }, Loss::Eager),
        ),
        ("flash attention".into(), with(flash, Loss::Eager)),
        ("… and SwiGLU save-gate-up".into(), with(level(SwigluLevel::SaveGateUp), Loss::Eager)),
        ("… and SwiGLU save-one".into(), with(level(SwigluLevel::SaveOne), Loss::Eager)),
        ("… and SwiGLU input-only".into(), with(level(SwigluLevel::InputOnly), Loss::Eager)),
        (
            "… and loss in chunks of 1024".into(),
            with(level(SwigluLevel::InputOnly), Loss::LinearCrossEntropy { tokens: 1024, whole: 0 }),
        ),
        ("full recomputation".into(), with(full, Loss::Eager)),
        (
            "full, loss in chunks of 1024".into(),
            with(full, Loss::LinearCrossEntropy { tokens: 1024, whole: 0 }),
        ),
    ]
}
