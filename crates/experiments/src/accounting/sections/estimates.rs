//! Memory budgets in series: each varies one choice and keeps the others.

use accounting::decoder_flops::{Recomputation, Workload};
use accounting::memory::logits::Loss;
use accounting::memory::optimizer::Optimizer;
use accounting::memory::recipe::Recipe;
use accounting::memory::zero::ZeroStage;
use accounting::recompute::{AttentionKernel, Recompute, SwigluLevel};
use accounting::textbook::{Memory, PARTS, Step, memory};
use accounting::{Error, presets};
use report::{Case, Environment, Metric, Record};

use super::record;

/// A series' name, its model, and its steps.
type Series = (&'static str, &'static str, Vec<(String, Step)>);

/// The budget at the peak of each step of each series.
pub(crate) fn estimates(environment: &Environment) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    for (series, name, steps) in all_series() {
        let model = presets::find(name)?;
        for (label, step) in steps {
            let case = Case::new()
                .with("varied", series)
                .with("model", name)
                .with("batch", step.work.batch)
                .with("sequence", step.work.sequence)
                .with("step", label);
            let metrics = metrics(&memory(&model, &step)?);
            records.extend(
                metrics.into_iter().map(|metric| record("accounting-estimate", &case, metric, environment)),
            );
        }
    }
    Ok(records)
}

/// The metric of each part at the peak, `<part>_bytes`, and `peak_bytes` with the moment in its note.
fn metrics(memory: &Memory) -> Vec<Metric> {
    let peak = memory.peak();
    let name = |part: &str| format!("{}_bytes", part.replace(' ', "_"));
    let mut metrics: Vec<Metric> =
        PARTS.into_iter().map(|part| Metric::exact(&name(part), "B", peak.bytes(part) as f64)).collect();
    let mut total = Metric::exact("peak_bytes", "B", peak.total as f64);
    total.note = Some(format!("at the {}", peak.moment));
    metrics.push(total);
    metrics
}

fn all_series() -> [Series; 4] {
    // Gradients of earlier batches and a loss in chunks: the model states are what these series are about.
    let small = Step {
        work: Workload { batch: 8, sequence: 1024 },
        loss: Loss::LinearCrossEntropy { tokens: 1024, whole: 0 },
        accumulate: true,
        ..Step::default()
    };
    let large = Step { work: Workload { batch: 4, sequence: 4096 }, ..Step::default() };
    let recipes = Recipe::ALL.map(|recipe| (recipe.name.to_owned(), Step { recipe, ..small }));
    let optimizers =
        Optimizer::ALL.map(|optimizer| (optimizer.name().to_owned(), Step { optimizer, ..small }));
    let mut zero = Vec::new();
    for stage in ZeroStage::ALL {
        let step = Step { work: Workload { batch: 1, sequence: 4096 }, stage, devices: 8, ..small };
        zero.push((format!("ZeRO-{}", stage.number()), step));
    }
    [
        ("recipe", "qwen2.5-0.5b", recipes.into()),
        ("optimizer", "qwen2.5-0.5b", optimizers.into()),
        ("recomputation", "qwen2.5-0.5b", recomputation(large)),
        ("zero", "llama-3-8b", zero),
    ]
}

/// Recomputation plans, from keeping everything to keeping as little as possible.
fn recomputation(step: Step) -> Vec<(String, Step)> {
    let with = |recomputation, loss| Step { recomputation, loss, ..step };
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
