//! The order in which a block's forward makes tensors and frees those that it does not keep.

use super::{Block, ProjectionBytes, Recorded};
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
        if let Some(linear) = &self.linear {
            return self.forward_linear(linear, tracker, record, input);
        }
        let recorded = self.recorded(input);
        let release = |tracker: &mut PeakTracker, kept: bool, bytes: u64| {
            if !(record && kept) {
                tracker.free(bytes);
            }
        };
        self.project_norm(tracker, &[Query, Key, Value], record);
        if self.is_gated {
            // Queries and gates apart.
            tracker.make(2 * self.query);
            tracker.free(2 * self.query);
        }
        // Each step makes new queries and keys, then frees its inputs: first the norms, then the rotation.
        if let Some(norms) = &self.query_key_norms {
            tracker.make(self.query + self.key + norms.statistics);
            tracker.free(self.query + self.key);
            release(tracker, recorded.attention, norms.statistics);
        }
        // A part of the columns rotates first, and is joined with the others.
        tracker.make(self.rotated.unwrap_or(0));
        tracker.make(self.query + self.key);
        tracker.free(self.rotated.unwrap_or(0));
        release(tracker, recorded.attention && self.query_key_norms.is_some(), self.query + self.key);
        if self.mixed_in_fp32 {
            // Operands in fp32, the result, the same rounded.
            let attended = 2 * (self.attended_query + self.attended_key) + self.log_sum_exp;
            tracker.make(attended + self.query);
            release(tracker, recorded.attention, attended);
        } else {
            self.exchange_heads(tracker);
            tracker.make(self.query + self.log_sum_exp);
            release(tracker, recorded.attention, self.log_sum_exp);
        }
        if self.exchange.is_some() {
            release(tracker, recorded.attention, self.query + 2 * self.attended_keys());
            self.exchange_output(tracker, record && recorded.attention);
        }
        if self.is_gated {
            // The gate's sigmoid, and the product.
            tracker.make(2 * self.query);
        }
        self.project(tracker, Output, record);
        if self.is_gated {
            tracker.free(self.query);
            release(tracker, recorded.attention, self.query);
            release(tracker, self.learns(&[Output]), self.query);
            return release(tracker, recorded.attention, 2 * self.query + 2 * self.key);
        }
        if self.exchange.is_some() {
            return release(tracker, self.learns(&[Output]), self.query);
        }
        // Queries, keys, values and output exist until their function ends.
        release(tracker, recorded.attention && !self.mixed_in_fp32, self.query + 2 * self.key);
        release(tracker, recorded.attention && !self.mixed_in_fp32 || self.learns(&[Output]), self.query);
    }

    fn forward_feed_forward(&self, tracker: &mut PeakTracker, record: bool, input: bool) {
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
            let is_recorded = recorded.middle || experts.learns();
            experts.forward(tracker, record && is_recorded, recorded.middle);
            if let Some(shared) = &self.shared {
                self.forward_shared(shared, tracker, record, &recorded);
            }
        } else {
            self.forward_swiglu(tracker, record, &recorded);
        }
        self.add(tracker);
        release(tracker, self.keeps_second_output(&recorded), self.narrow);
        release(tracker, recorded.middle && !self.keeps_output, self.narrow);
    }

    /// Gate, up, their product and down; leaves the result and what is kept.
    pub(super) fn forward_swiglu(&self, tracker: &mut PeakTracker, record: bool, recorded: &Recorded) {
        use Projection::{Down, Gate, Up};
        let release = |tracker: &mut PeakTracker, kept: bool, bytes: u64| {
            if !(record && kept) {
                tracker.free(bytes);
            }
        };
        self.project_norm(tracker, &[Gate, Up], record);
        tracker.make(self.wide);
        release(tracker, recorded.middle || self.learns(&[Gate, Up]), 2 * self.wide);
        self.project(tracker, Down, record);
        release(tracker, self.learns(&[Down]), self.wide);
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
    pub(super) fn project_norm(&self, tracker: &mut PeakTracker, which: &[Projection], record: bool) {
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
    pub(super) fn project(&self, tracker: &mut PeakTracker, which: Projection, record: bool) {
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
