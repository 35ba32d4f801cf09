//! `fused-ce memory`: the memory of a training step, part by part.

use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress, Sink};
use tch::Kind;

use super::sizes;
use super::step_memory::{StepMemory, measure, predict, thinned};
use super::training::Variant;

const EXPERIMENT: &str = "fused-ce-memory";
/// Points of a timeline.
const POINTS: usize = 150;

#[derive(clap::Args)]
pub(crate) struct Memory {
    /// How large
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
}

pub(crate) fn run(common: &CommonArgs, arguments: &Memory) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    runtime::memory::track_cpu()?;
    let mut sink = Sink::new(common, crate::environment::of(device)?, arguments.scale)?;
    let sizes = sizes::training(arguments.scale, Kind::Float, device, common.seed);
    let mut progress = Progress::new(Variant::ALL.len() as u64);
    for variant in Variant::ALL {
        progress.message(&format!("one step, {variant}"));
        let rows = [sizes.batch_size as i64, sizes.sequence as i64];
        let step = measure(&sizes.model, variant, rows, Kind::Float, common.seed, device)?;
        progress.step();
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
            sink.put(
                EXPERIMENT,
                &case,
                vec![
                    Metric::exact("part_bytes", "B", bytes as f64),
                    Metric::exact("predicted_bytes", "B", predicted as f64),
                ],
            )?;
        }
        sink.put(
            EXPERIMENT,
            &case,
            vec![
                Metric::exact("peak_bytes", "B", peak as f64),
                Metric::exact("predicted_peak_bytes", "B", predicted.peak as f64),
            ],
        )?;
        for (at, bytes) in thinned(&step.timeline, POINTS) {
            let case = case.clone().with("seconds", (at * 1e4).round() / 1e4);
            sink.put(EXPERIMENT, &case, vec![Metric::exact("live_bytes", "B", bytes as f64)])?;
        }
    }
    Ok(())
}
