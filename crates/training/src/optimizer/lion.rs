//! Lion: c ← β₁·m + (1−β₁)·g, θ ← (1 − η·λ)·θ − η·sign(c), m ← β₂·m + (1−β₂)·g, with m initially 0 and sign(0) = 0.
//!
//! The momentum that decides a step weighs the newest gradient more than the one that is kept. Each coordinate moves by η, whatever the size of
//! its gradient. The paper takes a third to a tenth of AdamW's learning rate, with a weight decay as many times larger. One slot: half of
//! AdamW's state. A step has no temporaries on a CPU (`kernels::lion`).

use kernels::lion::{LionStep, lion};

use super::rule::{Extent, Hyperparameters, Rule, Slot, Tensors, fraction};
use crate::error::Result;

/// Lion (Chen et al., arXiv:2302.06675). λ is the group's weight decay, which is decoupled. See the [module](super).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lion {
    /// β₁, in [0, 1).
    pub beta1: f64,
    /// β₂, in [0, 1).
    pub beta2: f64,
}

impl Default for Lion {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.99 }
    }
}

impl Rule for Lion {
    fn name(&self) -> &'static str {
        "lion"
    }

    fn slots(&self, parameter: Extent<'_>) -> Vec<Slot> {
        Slot::like(parameter, &["exp_avg"])
    }

    fn check(&self) -> Result<()> {
        fraction("lion", "beta1", self.beta1)?;
        fraction("lion", "beta2", self.beta2)
    }

    fn update(&self, tensors: &Tensors<'_>, hyperparameters: Hyperparameters) -> Result<()> {
        let Hyperparameters { lr, weight_decay, .. } = hyperparameters;
        let step = LionStep { lr, beta1: self.beta1, beta2: self.beta2, weight_decay };
        let all = tensors.params.iter().zip(tensors.grads).zip(&tensors.slots[0]);
        Ok(all.into_iter().try_for_each(|((param, grad), momentum)| lion(param, grad, momentum, &step))?)
    }
}
