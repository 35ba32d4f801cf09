//! Attention that writes the scores of all pairs of positions to memory.

use super::view::{View, times};
use super::{Detector, Evidence};
use crate::composition::Phase;

pub(super) const DETECTOR: Detector = Detector {
    name: "attention by softmax",
    looks_at: "softmax over scores of pairs of positions with products before and after it",
    detect,
};

fn detect(view: &View<'_>) -> Option<Evidence> {
    let mut tally = view.tally();
    // Scores by step: [rows of all heads, queries, keys], as the products see them.
    let mut scores: Vec<(usize, [i64; 3])> = Vec::new();
    let mut products: Vec<(usize, [i64; 3], f64)> = Vec::new();
    for (step, seen) in view.in_phase(Phase::Forward) {
        let shape = seen.shape(0);
        match (seen.name, shape) {
            ("aten::_softmax", [batch @ .., queries, keys]) if !batch.is_empty() && *queries > 1 => {
                scores.push((step, [batch.iter().product(), *queries, *keys]));
                tally.also(step, seen.seconds());
            }
            ("aten::bmm", &[batch, rows, columns]) => {
                products.push((step, [batch, rows, columns], seen.seconds()))
            }
            _ => {}
        }
    }
    for (step, shape) in scores {
        let of_scores =
            products.iter().find(|(product_step, product, _)| (*product_step, *product) == (step, shape));
        if let Some((_, _, seconds)) = of_scores {
            // The product before it does as much work as the one after.
            tally.add(step, 2.0 * seconds);
            tally.saw(format!("{shape:?}"));
        }
    }
    for (step, seen) in view.in_phase(Phase::Backward) {
        if seen.name == "aten::_softmax_backward_data" && seen.shape(0).len() > 2 {
            tally.also(step, seen.seconds());
        }
    }
    let count = tally.count();
    (count >= 1.0).then(|| Evidence {
        evidence: format!("scores are written to memory {}: [heads of all rows, queries, keys] {}", times(count), tally.shapes()),
        per_step: count,
        share: Some(tally.share()),
        remedy: "Use scaled_dot_product_attention without dropout, with a boolean mask or the causal flag, so that it \
                 takes the flash kernel, which keeps no scores."
            .into(),
    })
}
