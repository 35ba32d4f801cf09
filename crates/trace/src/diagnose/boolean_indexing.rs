//! Selection by a boolean mask, which counts and copies, and on CUDA makes the host wait for the count.

use super::view::{View, times};
use super::{Detector, Evidence};
use crate::composition::Phase;

pub(super) const DETECTOR: Detector = Detector {
    name: "boolean indexing",
    looks_at: "index, masked_select and nonzero over boolean tensors",
    detect,
};

fn detect(view: &View<'_>) -> Option<Evidence> {
    let mut tally = view.tally();
    let selects = |name: &str| ["aten::nonzero", "aten::masked_select"].contains(&name);
    for (step, seen) in
        view.in_steps().filter(|(_, seen)| selects(seen.name) && seen.context.phase != Phase::Backward)
    {
        let outermost = view.outermost(seen);
        let by_mask = seen.name == "aten::masked_select" || view.kind(&seen, 0) == "bool";
        // `masked_select` may call `nonzero`.
        if by_mask && (outermost.index == seen.index || !selects(outermost.name)) {
            tally.add(step, outermost.seconds());
            tally.saw(format!("{} {:?}", outermost.name, seen.shape(0)));
        }
    }
    let count = tally.count();
    let nodes = ["IndexBackward0", "MaskedSelectBackward0"];
    for (step, seen) in view.in_phase(Phase::Backward).filter(|(_, seen)| nodes.contains(&seen.name)) {
        tally.also(step, seen.seconds());
    }
    (count >= 1.0).then(|| Evidence {
        evidence: format!("elements are selected by a mask {}: {}", times(count), tally.shapes()),
        per_step: count,
        share: Some(tally.share()),
        remedy: "Keep all positions, and label those to ignore with the loss's ignore index.".into(),
    })
}
