//! Tokenizing while the training waits.

use super::view::{View, times};
use super::{Detector, Evidence};
use crate::composition::seconds;
use crate::timeline::TOKENIZE;

pub(super) const DETECTOR: Detector = Detector {
    name: "tokenizing in the step",
    looks_at: "ranges named tokenize on the training thread within steps",
    detect,
};

fn detect(view: &View<'_>) -> Option<Evidence> {
    let mut tally = view.tally();
    let ranges = view.profile.ranges.iter().filter(|range| view.profile.range_name(range) == TOKENIZE);
    for range in ranges {
        let Some(step) = view.timeline.step_at(range.start) else { continue };
        if view.timeline.steps[step].thread == range.thread {
            tally.add(step, seconds(range.end - range.start));
        }
    }
    let count = tally.count();
    (count >= 1.0).then(|| Evidence {
        evidence: format!("the training thread tokenizes {}", times(count)),
        per_step: count,
        share: Some(tally.share()),
        remedy: "Tokenize once, before the training, into a memory-mapped token store.".into(),
    })
}
