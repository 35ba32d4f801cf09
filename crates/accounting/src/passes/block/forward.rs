//! The order in which a block's forward makes tensors and frees those that it does not keep.

use super::{Block, ProjectionBytes};
use crate::lora::Projection;
use crate::passes::PeakTracker;

impl Block {
    /// Leaves the block's output and, with `record`, the tensors that it keeps except its input; `input` as for [`Block::kept`].
    pub(crate) fn forward(&self, tracker: &mut PeakTracker, record: bool, input: bool) {
        self.forward_with(tracker, [record; 2], input);
    }

    /// [`Block::forward`], where whether the attention and whether the rest is recorded are two flags.
    pub(super) fn forward_with(
        &self,
        tracker: &mut PeakTracker,
        [attention, record]: [bool; 2],
        input: bool,
    ) {
        let recorded = self.recorded(input);
        tracker.make(self.narrow + self.statistic);
        if !(record && recorded.input) {
            tracker.free(self.statistic);
        }
        self.forward_attention(tracker, attention, input);
        self.add(tracker);
        // The input of a recomputed attention is kept in any case.
        if !(record && (!attention || self.keeps_first_output(&recorded))) {
            tracker.free(self.narrow);
        }
        self.forward_feed_forward(tracker, record, input);
    }

    /// Runs from the queries' projection to the output's.
    pub(super) fn forward_attention(&self, tracker: &mut PeakTracker, record: bool, input: bool) {
        use Projection::{Key, Output, Query, Value};
        let recorded = self.recorded(input);
        let release = |tracker: &mut PeakTracker, kept: bool, bytes: u64| {
            if !(record && kept) {
                tracker.free(bytes);
            }
        };
        self.project_norm(tracker, &[Query, Key, Value], record);
        // Each step makes new queries and keys, then frees its inputs: first the norms, then the rotation.
        if let Some(norms) = &self.query_key_norms {
            tracker.make(self.query + self.key + norms.statistics);
            tracker.free(self.query + self.key);
            release(tracker, recorded.attention, norms.statistics);
        }
        tracker.make(self.query + self.key);
        release(tracker, recorded.attention && self.query_key_norms.is_some(), self.query + self.key);
        if self.mixed_in_fp32 {
            // Operands in fp32, the result, its documents together, the same rounded.
            let attended = 2 * (self.attended_query + self.attended_key) + self.log_sum_exp;
            tracker.make(attended);
            let joined = if self.documents { self.attended_query } else { 0 };
            tracker.make(joined + self.query);
            tracker.free(joined);
            release(tracker, recorded.attention, attended);
        } else {
            tracker.make(self.query + self.log_sum_exp);
            release(tracker, recorded.attention, self.log_sum_exp);
            if self.documents {
                tracker.make(self.query);
                if !(record && self.keeps_both_outputs(&recorded)) {
                    tracker.free(self.query);
                }
            }
        }
        self.project(tracker, Output, record);
        // Queries, keys, values and output exist until their function ends.
        release(tracker, recorded.attention && !self.mixed_in_fp32, self.query + 2 * self.key);
        release(tracker, recorded.attention && !self.mixed_in_fp32 || self.learns(&[Output]), self.query);
    }

    fn forward_feed_forward(&self, tracker: &mut PeakTracker, record: bool, input: bool) {
        use Projection::{Down, Gate, Up};
        let recorded = self.recorded(input);
        let release = |tracker: &mut PeakTracker, kept: bool, bytes: u64| {
            if !(record && kept) {
                tracker.free(bytes);
            }
        };
        tracker.make(self.narrow + self.statistic);
        release(tracker, recorded.middle, self.statistic);
        if let Some(tiled) = &self.tiled {
            tiled.forward(tracker);
        } else if let Some(experts) = &self.experts {
            experts.forward(tracker, record && recorded.middle);
        } else {
            self.project_norm(tracker, &[Gate, Up], record);
            tracker.make(self.wide);
            release(tracker, recorded.middle || self.learns(&[Gate, Up]), 2 * self.wide);
            self.project(tracker, Down, record);
            release(tracker, self.learns(&[Down]), self.wide);
        }
        self.add(tracker);
        release(tracker, self.keeps_second_output(&recorded), self.narrow);
        release(tracker, recorded.middle && !self.keeps_output, self.narrow);
    }

    /// Computes the residual stream, then frees the branch.
    fn add(&self, tracker: &mut PeakTracker) {
        if self.multiplies {
            tracker.make(self.operand);
            tracker.free(self.operand);
        }
        // A branch in 16 bits is cast for the sum.
        let cast = if self.mixed { self.narrow } else { 0 };
        tracker.make(cast + self.narrow);
        tracker.free(cast + self.operand);
    }

    /// [`Block::project`] of all projections of a norm's output, which mixed precision casts for each.
    fn project_norm(&self, tracker: &mut PeakTracker, which: &[Projection], record: bool) {
        if self.joins(which) {
            return self.project_joint(tracker, which, record);
        }
        for &which in which {
            let cast = if self.mixed { self.operand } else { 0 };
            tracker.make(cast);
            self.project(tracker, which, record);
            if !(record && self.learns(&[which])) {
                tracker.free(cast);
            }
        }
    }

    /// Leaves the output, and u if it is kept.
    fn project(&self, tracker: &mut PeakTracker, which: Projection, record: bool) {
        let sizes = self.projection(which);
        if !sizes.adapted {
            tracker.make(sizes.output);
            return tracker.touch(sizes.tile);
        }
        if self.joins(&[which]) {
            return self.project_joint(tracker, &[which], record);
        }
        if sizes.unscaled > 0 {
            return self.project_scaled(tracker, sizes, record);
        }
        tracker.make(sizes.wide_output);
        tracker.touch(sizes.tile);
        let wide_input = if self.rounds { sizes.wide_input } else { 0 };
        tracker.make(wide_input + sizes.low + sizes.factors);
        if self.dropout {
            tracker.touch(sizes.mask + sizes.wide_input);
        }
        // s·u.
        tracker.touch(sizes.terms * sizes.low);
        if self.rounds {
            tracker.make(sizes.output);
            tracker.free(sizes.wide_output);
        }
        tracker.free(wide_input);
        if !record {
            tracker.free(sizes.low + sizes.factors);
        }
    }

    /// [`Block::project`] with DoRA: leaves also the product before it is multiplied.
    fn project_scaled(&self, tracker: &mut PeakTracker, sizes: &ProjectionBytes, record: bool) {
        tracker.touch(sizes.norms);
        let dropped = if self.dropout { sizes.input } else { 0 };
        let mask = if self.dropout { sizes.mask } else { 0 };
        let wide_input = if self.rounds { sizes.wide_input } else { 0 };
        tracker.touch(mask + dropped);
        tracker.make(dropped + sizes.unscaled);
        tracker.touch(sizes.tile);
        tracker.make(wide_input + sizes.low);
        tracker.touch(sizes.terms * sizes.low);
        tracker.free(wide_input + dropped);
        tracker.make(sizes.wide_output);
        if self.dropout {
            tracker.touch(mask + dropped);
            tracker.touch(2 * dropped + sizes.tile);
        }
        if self.rounds {
            tracker.make(sizes.output);
            tracker.free(sizes.wide_output);
        }
        if !record {
            tracker.free(sizes.low + sizes.unscaled);
        }
    }
}
