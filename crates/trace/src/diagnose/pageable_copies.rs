//! Copies between the host's pageable memory and a CUDA device, which the host must wait for.

use super::view::{View, times};
use super::{Detector, Evidence};
use crate::composition::seconds;
use crate::trace_file::DeviceWork;

pub(super) const DETECTOR: Detector = Detector {
    name: "pageable copies",
    looks_at: "copies between pageable memory and a CUDA device",
    detect,
};

fn detect(view: &View<'_>) -> Option<Evidence> {
    let mut tally = view.tally();
    let mut bytes = 0;
    for copy in view.profile.device.iter().filter(|event| event.work == DeviceWork::Copy) {
        let name = view.profile.device_name(copy);
        if let (true, Some(step)) = (name.contains("Pageable"), view.timeline.step_at(copy.start)) {
            tally.add(step, seconds(copy.end - copy.start));
            tally.saw(name.to_owned());
            bytes += copy.bytes;
        }
    }
    let count = tally.count();
    (count >= 1.0).then(|| Evidence {
        evidence: format!(
            "copies with pageable memory {}, {} in a step: {}",
            times(count),
            crate::quantity::human(bytes as f64 / view.timeline.steps.len() as f64, "B"),
            tally.shapes()
        ),
        per_step: count,
        share: Some(tally.share()),
        remedy: if view.facts.pinned == Some(true) {
            "Batches are already pinned: look for tensors that are created on the host within the step."
                .into()
        } else {
            "Let the loader write batches to pinned buffers, and copy them without blocking.".into()
        },
    })
}
