//! `fused-ce memory`: the memory of a training step, part by part.

use report::{Case, Metric};
use tch::Kind;

use super::sizes;
use super::step_memory::{StepMemory, measure, predict, thinned};
use super::training::Variant;
use crate::driver::Bench;

/// Points of a timeline.
const POINTS: usize = 150;

pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    let device = bench.device;
    runtime::memory::track_cpu()?;
    let sizes = sizes::training(bench.scale, Kind::Float, device, bench.seed);
    let label = |variant: &Variant| format!("one step, {variant}");
    bench.each(Variant::ALL, label, |bench, variant| {
        let rows = [sizes.batch_size as i64, sizes.sequence as i64];
        let step = measure(&sizes.model, variant, rows, Kind::Float, bench.seed, device)?;
        let case = Case::new().with("loss", variant.to_string());
        let StepMemory { parameters, optimizer, gradients, activations, logits, peak, .. } = step;
        let predicted = predict(&sizes.model, variant, rows, device)?;
        for (part, bytes, predicted) in [
            ("parameters", parameters, predicted.parameters),
            ("optimizer state", optimizer, predicted.optimizer),
            ("gradients", gradients, predicted.gradients),
            ("activations", activations, predicted.activations),
            ("logits and loss", logits, predicted.logits),
        ] {
            let case = case.clone().with("part", part);
            bench.put(
                &case,
                vec![
                    Metric::exact("part_bytes", "B", bytes as f64),
                    Metric::exact("predicted_bytes", "B", predicted as f64),
                ],
            )?;
        }
        bench.put(
            &case,
            vec![
                Metric::exact("peak_bytes", "B", peak as f64),
                Metric::exact("predicted_peak_bytes", "B", predicted.peak as f64),
            ],
        )?;
        for (at, bytes) in thinned(&step.timeline, POINTS) {
            let case = case.clone().with("seconds", (at * 1e4).round() / 1e4);
            bench.put(&case, vec![Metric::exact("live_bytes", "B", bytes as f64)])?;
        }
        Ok(())
    })
}
