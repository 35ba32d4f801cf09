//! The inverse questions on known devices.

use accounting::decoder_flops::{Recomputation, Workload};
use accounting::fit::{bisect, scaled};
use accounting::memory::logits::Loss;
use accounting::recompute::{Recompute, SwigluLevel};
use accounting::textbook::{Step, memory};
use accounting::{Decoder, Error, hardware, presets};
use report::{Case, Environment, Metric, Record};

use super::record;

/// Largest batch (of 1024 tokens), longest sequence (one of them) and largest model of the family (one sequence of
/// 1024) for each of `models` on each of `devices`, without and with everything that saves memory.
pub(crate) fn fits(
    models: &[&str],
    devices: &[&str],
    environment: &Environment,
) -> Result<Vec<Record>, Error> {
    let plain = Step { work: Workload { batch: 1, sequence: 1024 }, ..Step::default() };
    let recomputation = Recomputation {
        checkpoint: Recompute::Full,
        swiglu: SwigluLevel::InputOnly,
        ..Recomputation::default()
    };
    let frugal = Step {
        recomputation,
        loss: Loss::LinearCrossEntropy { tokens: 1024, whole: 0 },
        fused_optimizer: true,
        ..plain
    };
    let mut records = Vec::new();
    for device in devices {
        let available = hardware::find(device)?.memory;
        for name in models {
            let model = presets::find(name)?;
            for (label, plan) in [("keep everything", plain), ("frugal", frugal)] {
                let case = Case::new().with("device", *device).with("model", *name).with("plan", label);
                let batch = largest_batch(&model, &plan, available).map(|batch| batch as f64);
                let sequence = longest_sequence(&model, &plan, available).map(|tokens| tokens as f64);
                let parameters =
                    largest_model(&model, &plan, available).and_then(|model| Ok(model.parameters()? as f64));
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

/// Bytes at the peak.
fn peak(model: &Decoder, step: &Step) -> Result<u64, Error> {
    Ok(memory(model, step)?.peak().total)
}

fn largest_batch(model: &Decoder, step: &Step, available: u64) -> Result<u64, Error> {
    let sized = |batch| Step { work: Workload { batch, ..step.work }, ..*step };
    bisect("batch", available, u64::MAX, |batch| peak(model, &sized(batch)))
}

/// The longest sequence of a step of `model` in `available` bytes. Learned positions are a limit too.
pub(super) fn longest_sequence(model: &Decoder, step: &Step, available: u64) -> Result<u64, Error> {
    let positions = if model.family.has_learned_positions() { model.context } else { u64::MAX };
    let sized = |sequence| Step { work: Workload { sequence, ..step.work }, ..*step };
    bisect("sequence", available, positions, |sequence| peak(model, &sized(sequence)))
}

fn largest_model(template: &Decoder, step: &Step, available: u64) -> Result<Decoder, Error> {
    let size = bisect("model", available, u64::MAX, |n| peak(&scaled(template, n)?, step))?;
    scaled(template, size)
}
