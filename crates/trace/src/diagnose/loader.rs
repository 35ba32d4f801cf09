//! A training that waits for its data.

use super::view::View;
use super::{Detector, Evidence};
use crate::composition::Phase;
use crate::timeline::LOAD;

pub(super) const DETECTOR: Detector =
    Detector { name: "waiting for data", looks_at: "the share of the step in its data part", detect };

/// The minimum share of a step.
const SHARE: f64 = 0.05;

fn detect(view: &View<'_>) -> Option<Evidence> {
    let time = view.composition.phase(Phase::Data);
    let share = time.seconds / view.composition.median.seconds;
    if share < SHARE {
        return None;
    }
    let is_training = |thread| view.timeline.steps.iter().any(|step| step.thread == thread);
    let loads = view
        .profile
        .ranges
        .iter()
        .any(|range| view.profile.range_name(range) == LOAD && !is_training(range.thread));
    let (who, remedy) = match view.facts.workers {
        Some(0) => ("the training thread loads them itself", "Load in worker threads that prefetch."),
        None if !loads => ("no worker is seen loading", "Load in worker threads that prefetch."),
        _ => (
            "workers load them",
            "Give the loader more workers or a longer prefetch, or prepare the data once: tokenized, packed, mapped.",
        ),
    };
    let workers = view.facts.workers.map_or(String::new(), |workers| format!(" ({workers} workers)"));
    Some(Evidence {
        evidence: format!("{:.1} % of the step is spent in data; {who}{workers}", 100.0 * share),
        per_step: 0.0,
        share: Some(share),
        remedy: remedy.into(),
    })
}
