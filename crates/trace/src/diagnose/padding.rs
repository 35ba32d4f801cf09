//! Padding positions are computed like others.

use super::view::View;
use super::{Detector, Evidence};
use crate::composition::Phase;

pub(super) const DETECTOR: Detector =
    Detector { name: "padding", looks_at: "the share of padding, when it is given", detect };

/// The minimum share of padding.
const SHARE: f64 = 0.1;

fn detect(view: &View<'_>) -> Option<Evidence> {
    let padding = view.facts.padding_share.filter(|share| *share >= SHARE)?;
    let phases = [Phase::Forward, Phase::Backward].map(|phase| view.composition.phase(phase).seconds);
    let share = phases.iter().sum::<f64>() / view.composition.median.seconds;
    Some(Evidence {
        evidence: format!(
            "{:.1} % of the positions are padding, and forward and backward are {:.1} % of the step",
            100.0 * padding,
            100.0 * share
        ),
        per_step: 0.0,
        share: Some(padding * share),
        remedy: "Pack several documents into a row, or batch documents of similar lengths.".into(),
    })
}
