//! An attention mask that each forward builds, or converts to another dtype.

use super::view::{Seen, View, times};
use super::{Detector, Evidence};
use crate::composition::Phase;

pub(super) const DETECTOR: Detector = Detector {
    name: "mask in each forward",
    looks_at: "square tensors that forward makes, cuts to triangles, fills or converts",
    detect,
};

/// `[…, t, t]` with more than one position.
fn is_square(shape: &[i64]) -> bool {
    matches!(shape, [.., rows, columns] if rows == columns && *rows > 1)
}

/// Whether an operator creates a mask from scratch, of the shape of its first input.
fn makes(view: &View<'_>, seen: &Seen<'_>) -> bool {
    let around = view.parent(seen);
    let made_in =
        |names: &[&str]| around.is_some_and(|around| around.context.called && names.contains(&around.name));
    match seen.name {
        "aten::tril" | "aten::triu" | "aten::tril_" | "aten::triu_" => seen.context.called,
        "aten::fill_" => made_in(&["aten::ones", "aten::full"]),
        "aten::zero_" => made_in(&["aten::zeros"]),
        // A numeric mask has two dimensions; scores have a batch.
        "aten::masked_fill" | "aten::masked_fill_" => seen.context.called && seen.shape(0).len() == 2,
        _ => false,
    }
}

fn detect(view: &View<'_>) -> Option<Evidence> {
    // Sequence lengths, which distinguish a mask from a square weight.
    let mut lengths: Vec<i64> = Vec::new();
    for (_, seen) in view.in_phase(Phase::Forward) {
        let shape = seen.shape(0);
        let triangle = ["aten::tril", "aten::triu", "aten::tril_", "aten::triu_"].contains(&seen.name);
        let scores = seen.name == "aten::_softmax" && shape.len() > 2;
        if (triangle || scores) && is_square(shape) {
            lengths.extend(shape.last());
        }
        if seen.name == "aten::scaled_dot_product_attention" {
            lengths.extend(shape.len().checked_sub(2).map(|at| shape[at]));
        }
    }
    lengths.sort_unstable();
    lengths.dedup();
    let (parameters, _) = view.parameters();
    let mut tally = view.tally();
    for (step, seen) in view.in_phase(Phase::Forward) {
        let shape = seen.shape(0);
        let fits = is_square(shape) && shape.last().is_some_and(|length| lengths.contains(length));
        if !fits {
            continue;
        }
        let converts = seen.name == "aten::_to_copy"
            && view.outermost(seen).name == "aten::to"
            && !parameters.contains(&shape)
            && (shape.len() == 2 || view.kind(&seen, 0) == "bool");
        if makes(view, &seen) || converts {
            tally.add(step, view.outermost(seen).seconds());
            let does = if converts { "aten::to" } else { view.outermost(seen).name };
            tally.saw(format!("{does} {shape:?}"));
        }
    }
    let count = tally.count();
    (count >= 1.0).then(|| Evidence {
        evidence: format!("forward makes or converts masks {}: {}", times(count), tally.shapes()),
        per_step: count,
        share: Some(tally.share()),
        remedy: "Build the mask once, in the kind and on the device of its use, and keep it, or let attention be causal \
                 by a flag."
            .into(),
    })
}
