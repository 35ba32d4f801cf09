//! Adapted projections as a GPU runs them (`kernels::low_rank`): those of one input are one function.
//!
//! Its forward makes A of all terms, u of all terms, then the results. Its backward makes du of all terms, the adapters' gradients and one
//! gradient of the input, to which every projection adds, and frees the gradients of the results at its end. Separate functions free the
//! gradient of each result before the next one starts, and make a gradient of the input each.
//!
//! DoRA and mixed precision run each projection by itself.

use super::{Block, ProjectionBytes};
use crate::lora::{LowRank, Projection};
use crate::passes::PeakTracker;

/// The projections of one input.
const OF_ONE_INPUT: [&[Projection]; 6] = [
    &[Projection::Query, Projection::Key, Projection::Value],
    &[Projection::Output],
    &[Projection::Gate, Projection::Up],
    &[Projection::Down],
    &[Projection::LinearQkv, Projection::LinearGate, Projection::LinearRate, Projection::LinearDecay],
    &[Projection::LinearOutput],
];

/// Returns the low-rank terms of the projections that read the input of `which`.
pub(super) fn terms_of_input(lora: &LowRank, which: Projection) -> u64 {
    let readers = OF_ONE_INPUT.into_iter().find(|readers| readers.contains(&which)).unwrap_or_default();
    let adapted = readers.iter().filter(|one| lora.targets.has(**one)).count() as u64;
    adapted * lora.terms()
}

impl Block {
    /// Whether these projections of one input are one function.
    pub(super) fn joins(&self, which: &[Projection]) -> bool {
        self.joins && which.iter().any(|one| self.projection(*one).adapted)
    }

    fn bytes_of(&self, which: &[Projection], bytes: fn(&ProjectionBytes) -> u64) -> u64 {
        which.iter().map(|one| self.projection(*one)).filter(|one| one.adapted).map(bytes).sum()
    }

    /// Leaves the results, and u and the factors if they are kept.
    pub(super) fn project_joint(&self, tracker: &mut PeakTracker, which: &[Projection], record: bool) {
        let kept = self.bytes_of(which, |one| one.low + one.factors);
        tracker.make(kept);
        if self.dropout {
            let input = self.projection(which[0]);
            tracker.touch(input.mask + input.input);
        }
        for one in which.iter().map(|one| self.projection(*one)) {
            tracker.make(one.output);
            tracker.touch(one.tile);
        }
        if !record {
            tracker.free(kept);
        }
    }

    /// Leaves the gradient of the input if requested, and those of the adapters; frees u and the factors, but not the gradients of the
    /// results.
    pub(super) fn project_joint_back(&self, tracker: &mut PeakTracker, which: &[Projection], of_input: bool) {
        tracker.make(self.bytes_of(which, |one| one.gradients));
        let before = tracker.live();
        tracker.make(self.bytes_of(which, |one| one.low));
        let sizes = self.projection(which[0]);
        if self.dropout {
            tracker.touch(sizes.mask + sizes.input);
        }
        if of_input {
            tracker.make(sizes.input);
            if self.dropout {
                // du·A, and the same with the mask; of a second term beside their sum.
                let terms = self.bytes_of(which, |one| one.terms);
                let sum = if terms > 1 { sizes.input } else { 0 };
                tracker.touch(sum + sizes.input + sizes.mask);
            }
            for one in which {
                tracker.touch(self.projection(*one).tile_back);
            }
        }
        tracker.release_since(before);
        if of_input {
            tracker.make(sizes.input);
        }
        tracker.free(self.bytes_of(which, |one| one.low + one.factors));
    }
}
