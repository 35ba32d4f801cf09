//! The expert of a mixture that computes every token, and the gate of its result, as `models::mixture` runs them.
//!
//! Its three products and SwiGLU are those of an ordinary MLP. Of n tokens, the gate is one number each; the result `[n, d]` is multiplied by it, and
//! added to that of the routed experts. The multiplication keeps the result, for the gradient of the gate.

use super::{Block, BlockOptions, Recorded};
use crate::Error;
use crate::exact::product;
use crate::lora::Projection;
use crate::passes::PeakTracker;

const WHAT: &str = "bytes of a shared expert";

/// Bytes of its tensors beside those of an MLP.
pub(super) struct SharedExpert {
    /// `[n, d]`.
    operand: u64,
    /// `[n, 1]`.
    gate: u64,
    /// The gradient of the gate's weight, as far as it is counted.
    gate_gradient: u64,
}

impl SharedExpert {
    pub(super) fn new(hidden: u64, options: &BlockOptions<'_>) -> Result<Self, Error> {
        let BlockOptions { tokens, recipe, gradients, trained, .. } = *options;
        if recipe.casts {
            return Err(Error::Shape {
                what: "an expert for every token in mixed precision is not modelled".into(),
                remedy: "take bfloat16, or measure a step instead".into(),
            });
        }
        let c = recipe.compute.storage_bits() / 8;
        let is_trained = gradients && matches!(trained, super::Trained::Everything);
        Ok(Self {
            operand: product(WHAT, &[tokens, hidden, c])?,
            gate: product(WHAT, &[tokens, c])?,
            gate_gradient: if is_trained { recipe.gradients.bytes(hidden)? } else { 0 },
        })
    }

    /// What is kept for a gradient of the input: the result and its gate.
    pub(super) fn kept(&self) -> u64 {
        self.operand + self.gate
    }
}

impl Block {
    /// With the result of the routed experts, leaves the sum of both, and what is kept.
    pub(super) fn forward_shared(
        &self,
        shared: &SharedExpert,
        tracker: &mut PeakTracker,
        record: bool,
        recorded: &Recorded,
    ) {
        let release = |tracker: &mut PeakTracker, kept: bool, bytes: u64| {
            if !(record && kept) {
                tracker.free(bytes);
            }
        };
        tracker.make(2 * shared.gate);
        tracker.free(shared.gate);
        self.forward_swiglu(tracker, record, recorded);
        // The result times its gate, and the sum.
        tracker.make(shared.operand);
        release(tracker, recorded.middle, shared.operand + shared.gate);
        tracker.make(shared.operand);
        tracker.free(2 * shared.operand);
    }

    /// With the gradient of the sum, leaves that of the input if requested; frees what was kept.
    pub(super) fn backward_shared(
        &self,
        shared: &SharedExpert,
        tracker: &mut PeakTracker,
        recorded: &Recorded,
    ) {
        use Projection::{Down, Gate, Up};
        let gates = recorded.middle || self.learns(&[Gate, Up]);
        if !gates && !self.learns(&[Down]) {
            return;
        }
        // The gradient of the result; that of the gate.
        tracker.make(shared.operand);
        if recorded.middle {
            tracker.touch(shared.operand);
            tracker.make(shared.gate);
            tracker.free(shared.operand);
        }
        self.project_back(tracker, Down, gates);
        tracker.free(shared.operand);
        self.backward_swiglu(tracker, gates, recorded);
        if recorded.middle {
            // The gate's, added to the other gradient of the input.
            tracker.make(shared.operand + shared.gate_gradient);
            tracker.free(2 * shared.gate);
            tracker.make(self.narrow);
            tracker.free(2 * self.narrow);
        }
    }
}
