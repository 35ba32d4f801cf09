//! A CUDA device that waits for the host.

use super::view::View;
use super::{Detector, Evidence};

pub(super) const DETECTOR: Detector = Detector {
    name: "idle device",
    looks_at: "the share of the step in which a CUDA device runs nothing",
    detect,
};

/// The minimum share of a step.
const SHARE: f64 = 0.1;

fn detect(view: &View<'_>) -> Option<Evidence> {
    let device = view.composition.median.device.filter(|device| device.idle_share >= SHARE)?;
    Some(Evidence {
        evidence: format!(
            "the device runs nothing in {:.1} % of the step, which has {} kernels",
            100.0 * device.idle_share,
            device.kernels
        ),
        per_step: 0.0,
        share: Some(device.idle_share),
        remedy: "Let the host run ahead: read no values in the step, prefetch batches, launch fewer and larger kernels.".into(),
    })
}
