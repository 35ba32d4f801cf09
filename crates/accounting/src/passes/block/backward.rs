//! The order in which a block's backward frees kept tensors and makes gradients.

use super::{Block, ProjectionBytes, Recorded};
use crate::lora::Projection;
use crate::passes::PeakTracker;

impl Block {
    /// Frees the tensors that a recorded forward kept, except its input, and the gradient of the output; leaves the gradient of the input
    /// if requested.
    pub(crate) fn backward(&self, tracker: &mut PeakTracker, input: bool) {
        self.backward_to_attention(tracker, input);
        self.backward_of_attention(tracker, input);
        self.backward_of_first_norm(tracker, input);
    }

    /// Runs the backward down to the attention's output projection.
    pub(super) fn backward_to_attention(&self, tracker: &mut PeakTracker, input: bool) {
        use Projection::{Down, Gate, Up};
        let recorded = self.recorded(input);
        let gates = recorded.middle || self.learns(&[Gate, Up]);
        if let Some(tiled) = self.tiled.as_ref().filter(|_| recorded.feed_forward) {
            tracker.make(self.branch_gradient());
            tiled.backward(tracker);
            tracker.free(self.branch_gradient());
        } else if let Some(experts) = self.experts.as_ref().filter(|_| recorded.feed_forward) {
            tracker.make(self.branch_gradient());
            if let Some(shared) = &self.shared {
                self.backward_shared(shared, tracker, &recorded);
            }
            if recorded.middle || experts.learns() {
                experts.backward(tracker, recorded.middle);
            }
            if self.shared.is_some() {
                self.add_back(tracker, recorded.middle);
            }
            tracker.free(self.branch_gradient());
        } else if recorded.feed_forward {
            self.project_branch_back(tracker, Down, gates);
            self.backward_swiglu(tracker, gates, &recorded);
        }
        if self.keeps_second_output(&recorded) {
            tracker.free(self.narrow);
        }
        if recorded.middle {
            // The norm's gradient is computed in place, and added to the residual stream's.
            tracker.make(self.norm_gradient);
            tracker.free(self.statistic);
            tracker.free(if self.keeps_output { 0 } else { self.narrow });
            tracker.make(self.narrow);
            tracker.free(2 * self.narrow);
        }
    }

    /// With the gradient of gate and up's product, leaves that of the input if requested; frees the product, gate and up.
    pub(super) fn backward_swiglu(&self, tracker: &mut PeakTracker, gates: bool, recorded: &Recorded) {
        use Projection::{Down, Gate, Up};
        tracker.free(if self.learns(&[Down]) { self.wide } else { 0 });
        if gates {
            // The product's gradient is a view of a matrix with two owners, so neither gradient can replace it. Then it is
            // freed, and gate and up.
            tracker.make(2 * self.wide);
            tracker.free(3 * self.wide);
            self.project_norm_back(tracker, &[(Up, self.wide), (Gate, self.wide)], recorded.middle);
        }
    }

    /// Runs from the output's projection to the queries'.
    pub(super) fn backward_of_attention(&self, tracker: &mut PeakTracker, input: bool) {
        use Projection::{Key, Output, Query, Value};
        if let Some(linear) = &self.linear {
            return self.backward_of_linear(linear, tracker, input);
        }
        let recorded = self.recorded(input);
        let drop_if = |tracker: &mut PeakTracker, kept: bool, bytes: u64| {
            if kept {
                tracker.free(bytes);
            }
        };
        if recorded.middle {
            self.project_branch_back(tracker, Output, recorded.attention);
        }
        let rounded = !recorded.attention || self.mixed_in_fp32 || self.is_gated || self.exchange.is_some();
        drop_if(tracker, rounded && self.learns(&[Output]), self.query);
        if recorded.attention && self.is_gated {
            // The gradients of the attention's output and of the gate's sigmoid, then that of the gate, which stays.
            tracker.make(2 * self.query);
            tracker.free(self.query);
            tracker.make(self.query);
            tracker.free(2 * self.query);
        }
        if recorded.attention && self.mixed_in_fp32 {
            tracker.make(self.attended_query);
            tracker.free(self.query);
            tracker.make(self.attended_query + 2 * self.attended_key);
            tracker.free(self.attended_query);
            tracker.free(2 * (self.attended_query + self.attended_key) + self.log_sum_exp);
            for (rounded, wide) in [
                (self.key, self.attended_key),
                (self.key, self.attended_key),
                (self.query, self.attended_query),
            ] {
                tracker.make(rounded);
                tracker.free(wide);
            }
        } else if recorded.attention {
            self.exchange_output_back(tracker);
            tracker.make(self.query + 2 * self.attended_keys());
            tracker.touch(self.flash_workspace);
            // The output's gradient, and the tensors that attention kept, its output among them.
            tracker.free(self.query);
            tracker.free(2 * self.query + 2 * self.attended_keys() + self.log_sum_exp);
            self.exchange_heads_back(tracker);
        }
        if recorded.attention {
            match self.rotated {
                None => tracker.touch(self.query + self.key),
                // Those of the columns that do not rotate, then of those that do, in whole rows each.
                Some(rotated) => {
                    tracker.make(self.query + self.key + rotated);
                    tracker.free(self.query + self.key);
                    tracker.touch(self.query.max(self.key));
                    tracker.free(rotated);
                }
            }
            if let Some(norms) = &self.query_key_norms {
                tracker.make(norms.gradients);
                tracker.free(self.query + self.key + norms.statistics);
            }
            let mut of_queries = self.query;
            if self.is_gated {
                of_queries = 2 * self.query;
                tracker.make(of_queries);
                tracker.free(of_queries);
            }
            let gradients = [(Value, self.key), (Key, self.key), (Query, of_queries)];
            self.project_norm_back(tracker, &gradients, recorded.input);
        }
    }

    /// Runs the backward of the attention's norm.
    pub(super) fn backward_of_first_norm(&self, tracker: &mut PeakTracker, input: bool) {
        let recorded = self.recorded(input);
        if self.keeps_first_output(&recorded) {
            tracker.free(self.narrow);
        }
        if recorded.input {
            tracker.make(self.norm_gradient);
            tracker.free(self.statistic);
            tracker.make(self.narrow);
            tracker.free(2 * self.narrow);
        } else {
            tracker.free(self.narrow);
        }
    }

    /// The gradient of a branch's result where it is another tensor than that of the residual stream: it is cast as the result was,
    /// or multiplied.
    pub(super) fn branch_gradient(&self) -> u64 {
        if self.mixed || self.multiplies { self.operand } else { 0 }
    }

    /// [`Block::project_back`] of a branch's last product.
    pub(super) fn project_branch_back(&self, tracker: &mut PeakTracker, which: Projection, of_input: bool) {
        tracker.make(self.branch_gradient());
        self.project_back(tracker, which, of_input);
        tracker.free(self.branch_gradient());
    }

    /// [`Block::project_back`] of all products that read a norm's output, in the order of backward, each with the gradient of its result,
    /// which is freed; adds their gradients of the input.
    pub(super) fn project_norm_back(
        &self,
        tracker: &mut PeakTracker,
        all: &[(Projection, u64)],
        of_input: bool,
    ) {
        let which: Vec<Projection> = all.iter().map(|(which, _)| *which).collect();
        if self.joins(&which) {
            self.project_joint_back(tracker, &which, of_input);
            return tracker.free(all.iter().map(|(_, gradient)| gradient).sum());
        }
        for (number, &(which, gradient)) in all.iter().enumerate() {
            self.project_back(tracker, which, of_input);
            tracker.free(gradient);
            tracker.free(self.kept_casts(&[which]));
            if self.mixed && of_input {
                tracker.make(self.narrow);
                tracker.free(self.operand);
            }
            if number > 0 {
                self.add_back(tracker, of_input);
            }
        }
    }

    /// Adds two gradients of `[n, d]`: into new memory, because both are views, or in mixed precision into that of the first cast.
    pub(super) fn add_back(&self, tracker: &mut PeakTracker, there: bool) {
        if there && self.mixed {
            tracker.free(self.narrow);
        } else if there {
            tracker.make(self.narrow);
            tracker.free(2 * self.narrow);
        }
    }

    /// Leaves the gradient of the input if requested, and those of trained tensors; frees u.
    pub(super) fn project_back(&self, tracker: &mut PeakTracker, which: Projection, of_input: bool) {
        let sizes = self.projection(which);
        if !sizes.adapted {
            if of_input {
                tracker.make(sizes.input);
                tracker.touch(sizes.tile_back);
            }
            tracker.make(sizes.narrow_gradients);
            tracker.make(sizes.gradients);
            return tracker.free(sizes.narrow_gradients);
        }
        if self.joins(&[which]) {
            return self.project_joint_back(tracker, &[which], of_input);
        }
        if sizes.unscaled > 0 {
            return self.project_scaled_back(tracker, sizes, of_input);
        }
        tracker.make(sizes.gradients);
        let before = tracker.live();
        if self.rounds {
            tracker.make(sizes.wide_output);
        }
        tracker.make(if of_input { sizes.terms * sizes.low } else { sizes.low });
        if self.dropout {
            tracker.touch(sizes.mask + sizes.wide_input);
            tracker.make(sizes.wide_input);
            if of_input {
                tracker.make(sizes.wide_input);
            }
            // The mask is multiplied by x in fp32.
            if self.rounds {
                tracker.touch(sizes.wide_input);
            }
            tracker.free(sizes.wide_input);
        } else {
            if self.rounds {
                tracker.touch(sizes.wide_input);
            }
            if of_input {
                tracker.make(sizes.wide_input);
            }
        }
        if of_input {
            tracker.touch(sizes.tile_back);
        }
        if of_input && self.rounds {
            tracker.make(sizes.input);
        }
        tracker.release_since(before);
        if of_input {
            tracker.make(sizes.input);
        }
        tracker.free(sizes.low + sizes.factors);
    }

    /// [`Block::project_back`] with DoRA.
    fn project_scaled_back(&self, tracker: &mut PeakTracker, sizes: &ProjectionBytes, of_input: bool) {
        tracker.make(sizes.gradients);
        if self.rounds {
            tracker.make(sizes.wide_output);
        }
        // The gradient times the product, which is freed; then the gradient of the product.
        tracker.touch(sizes.wide_output);
        tracker.free(sizes.unscaled);
        let terms = if of_input { sizes.terms } else { 1 };
        tracker.make(sizes.wide_output + terms * sizes.low);
        let (mask, dropped) = if self.dropout { (sizes.mask, sizes.input) } else { (0, 0) };
        tracker.touch(mask + dropped);
        tracker.touch(dropped + if self.rounds { sizes.wide_input } else { 0 });
        if of_input {
            tracker.make(sizes.wide_input);
            tracker.touch(sizes.tile_back);
            if self.dropout {
                tracker.touch(mask + sizes.wide_input);
            }
            if self.rounds {
                tracker.make(sizes.input);
                tracker.free(sizes.wide_input);
            }
        }
        tracker.free(sizes.wide_output + terms * sizes.low + sizes.low);
        if self.rounds {
            tracker.free(sizes.wide_output);
        }
    }
}
