//! The inverse questions on known devices.

use accounting::decoder_flops::{Recomputation, Workload};
use accounting::estimate::TrainingPlan;
use accounting::fit::{largest_batch, largest_model, longest_sequence};
use accounting::memory::logits::Loss;
use accounting::memory::optimizer::StepKernel;
use accounting::recompute::{Recompute, SwigluLevel};
use accounting::{Error, hardware, presets};
use report::{Case, Environment, Metric, Record};

use super::record;

/// Largest batch (of 1024 tokens), longest sequence (one of them) and largest model of the family (one sequence of
/// 1024) for each of `models` on each of `devices`, without and with everything that saves memory.
pub(crate) fn fits(
    models: &[&str],
    devices: &[&str],
    environment: &Environment,
) -> Result<Vec<Record>, Error> {
    let plain = TrainingPlan { work: Workload { batch: 1, sequence: 1024 }, ..TrainingPlan::default() };
    let recomputation = Recomputation {
        checkpoint: Recompute::Full,
        swiglu: SwigluLevel::InputOnly,
        ..Recomputation::default()
    };
    let frugal = TrainingPlan {
        recomputation,
        loss: Loss::LinearCrossEntropy { tokens: 1024, whole: 0 },
        step: StepKernel::Fused,
        ..plain
    };
    let mut records = Vec::new();
    for device in devices {
        let memory = hardware::find(device)?.memory;
        for name in models {
            let model = presets::find(name)?;
            for (label, plan) in [("keep everything", plain), ("frugal", frugal)] {
                let case = Case::new().with("device", *device).with("model", *name).with("plan", label);
                let batch = largest_batch(&model, &plan, memory).map(|fit| fit.largest as f64);
                let sequence = longest_sequence(&model, &plan, memory).map(|fit| fit.largest as f64);
                let parameters =
                    largest_model(&model, &plan, memory).and_then(|fit| Ok(fit.largest.parameters()? as f64));
                let answers = [
                    ("largest_batch", "count", batch),
                    ("longest_sequence", "count", sequence),
                    ("largest_model_parameters", "count", parameters),
                ];
                for (metric, unit, answer) in answers {
                    let metric = match answer {
                        Ok(value) => Metric::exact(metric, unit, value),
                        Err(Error::NothingFits { needed, .. }) => {
                            Metric::not_measured(metric, unit, &format!("does not fit: needs {needed}"))
                        }
                        Err(error) => return Err(error),
                    };
                    records.push(record("accounting-fit", &case, metric, environment));
                }
            }
        }
    }
    Ok(records)
}
