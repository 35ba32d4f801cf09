//! AdamW: θ ← (1 − η·λ)·θ, then Adam's update with the plain gradient. The decay does not go through the moments, so it shrinks
//! every coordinate alike, whatever the size of its gradients. Two slots.

use runtime::ops::foreach;

use super::Adam;
use super::rule::{Extent, FusedStep, Hyperparameters, Rule, Slot, Tensors};
use crate::error::Result;

/// AdamW (Loshchilov & Hutter, arXiv:1711.05101). λ is the group's weight decay. See the [module](super).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// β₁, in [0, 1).
    pub beta1: f64,
    /// β₂, in [0, 1).
    pub beta2: f64,
    /// ε, added to the root.
    pub eps: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        let Adam { beta1, beta2, eps } = Adam::default();
        Self { beta1, beta2, eps }
    }
}

impl AdamW {
    pub(super) fn moments(&self) -> Adam {
        Adam { beta1: self.beta1, beta2: self.beta2, eps: self.eps }
    }
}

impl Rule for AdamW {
    fn name(&self) -> &'static str {
        "adam_w"
    }

    fn slots(&self, parameter: Extent<'_>) -> Vec<Slot> {
        Slot::like(parameter, &["exp_avg", "exp_avg_sq"])
    }

    fn check(&self) -> Result<()> {
        self.moments().check_as("adam_w")
    }

    fn update(&self, tensors: &Tensors<'_>, hyperparameters: Hyperparameters) -> Result<()> {
        foreach::mul_scalar_(tensors.params, 1.0 - hyperparameters.lr * hyperparameters.weight_decay)?;
        self.moments().follow(tensors, tensors.grads, hyperparameters)
    }

    fn fused(&self, step: &FusedStep<'_>) -> Option<Result<()>> {
        Some(self.moments().run_fused(step, true))
    }

    fn has_fused(&self) -> bool {
        true
    }
}
