//! The host reads a tensor's value within a step, which waits until the device has computed it.

use super::view::{View, times};
use super::{Detector, Evidence};

pub(super) const DETECTOR: Detector = Detector {
    name: "host synchronisation",
    looks_at: "values of tensors that the host reads within a step (item, is_nonzero)",
    detect,
};

fn detect(view: &View<'_>) -> Option<Evidence> {
    let mut tally = view.tally();
    for (step, seen) in view.in_steps().filter(|(_, seen)| seen.name == "aten::_local_scalar_dense") {
        let outermost = view.outermost(seen);
        // On the CPU an operator may read a number that was passed as a tensor, which waits for nothing.
        let asked = ["aten::item", "aten::is_nonzero", "aten::_local_scalar_dense"].contains(&outermost.name);
        if asked || view.profile.cuda {
            tally.add(step, if asked { outermost.seconds() } else { seen.seconds() });
            tally.saw(format!("in {}", outermost.context.phase.name()));
        }
    }
    let count = tally.count();
    (count >= 1.0).then(|| Evidence {
        evidence: format!("the host reads a value {}, {}", times(count), tally.shapes()),
        per_step: count,
        share: Some(tally.share()),
        remedy: "Accumulate losses and metrics in a tensor on the device, and read it once in tens of steps."
            .into(),
    })
}
