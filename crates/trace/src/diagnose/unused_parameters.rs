//! Trainable parameters that are not part of the loss.

use super::view::View;
use super::{Detector, Evidence};

pub(super) const DETECTOR: Detector = Detector {
    name: "unused parameters",
    looks_at: "trainable parameters without a gradient, when they are given",
    detect,
};

fn detect(view: &View<'_>) -> Option<Evidence> {
    let names = view.facts.parameters_without_gradient.as_ref().filter(|names| !names.is_empty())?;
    let listed = names.iter().take(3).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = if names.len() > 3 { ", …" } else { "" };
    let elements = view
        .facts
        .elements_without_gradient
        .map_or(String::new(), |elements| format!(" with {elements} elements"));
    Some(Evidence {
        evidence: format!("{} trainable parameters{elements} got no gradient: {listed}{more}", names.len()),
        per_step: names.len() as f64,
        share: None,
        remedy:
            "Remove them from the model, or freeze them, so that they take no memory for gradients and state."
                .into(),
    })
}
