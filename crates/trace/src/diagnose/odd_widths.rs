//! Layer widths that do not fill the vectors and tiles of matrix products.

use std::collections::{BTreeMap, BTreeSet};

use super::view::{Seen, View, times};
use super::{Detector, Evidence};
use crate::composition::Phase;

pub(super) const DETECTOR: Detector = Detector {
    name: "odd widths",
    looks_at: "inner and outer widths of the matrix products in forward",
    detect,
};

/// fp32 values in a vector of AVX-512.
const CPU_MULTIPLE: i64 = 16;
/// 16-bit values in the 16 bytes to which a tensor core aligns.
const CUDA_MULTIPLE: i64 = 8;

/// `[m, k] · [k, n]`: k and n, which the model decides; m depends on the batch.
fn widths(seen: &Seen<'_>) -> Option<(i64, i64)> {
    let second = match seen.name {
        "aten::mm" | "runtime::mm" => seen.shape(1),
        "aten::addmm" | "aten::_addmm_activation" => seen.shape(2),
        _ => return None,
    };
    <[i64; 2]>::try_from(second).ok().map(|[k, n]| (k, n))
}

fn detect(view: &View<'_>) -> Option<Evidence> {
    let multiple = if view.profile.cuda { CUDA_MULTIPLE } else { CPU_MULTIPLE };
    let odd = |width: i64| width > multiple && width % multiple != 0;
    // A width that is in every step belongs to the model, any other to the data.
    let mut steps_with: BTreeMap<(i64, i64), BTreeSet<usize>> = BTreeMap::new();
    for (step, seen) in view.in_phase(Phase::Forward) {
        if let Some(widths) = widths(&seen) {
            steps_with.entry(widths).or_default().insert(step);
        }
    }
    let steps = view.timeline.steps.len();
    let mut tally = view.tally();
    for (step, seen) in view.in_phase(Phase::Forward) {
        let Some((k, n)) = widths(&seen) else { continue };
        if steps_with[&(k, n)].len() == steps && (odd(k) || odd(n)) {
            tally.add(step, seen.seconds());
            for width in [k, n].into_iter().filter(|width| odd(*width)) {
                tally
                    .saw(format!("{width} (next multiple {})", (width + multiple - 1) / multiple * multiple));
            }
        }
    }
    let count = tally.count();
    // Backward has two products for each, with the same widths.
    (count >= 1.0).then(|| Evidence {
        evidence: format!("products with widths that are not a multiple of {multiple}, {}: {}", times(count), tally.shapes()),
        per_step: count,
        share: Some(3.0 * tally.share()),
        remedy: format!(
            "Round hidden sizes and the vocabulary up to a multiple of {}; padded rows of a vocabulary never become labels.",
            if view.profile.cuda { 64 } else { multiple }
        ),
    })
}
