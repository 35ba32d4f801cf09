//! SGD with Nesterov momentum, in the form that evaluates the gradient at the current parameters: m ← μ·m + g + λ·θ; θ ← θ −
//! η·(g + λ·θ + μ·m), with m initially 0. One slot.

use runtime::ops::foreach;

use super::rule::{Extent, Hyperparameters, Rule, Slot, Tensors, fraction};
use crate::error::Result;

/// SGD with Nesterov momentum (Nesterov, 1983; Sutskever et al., 2013). See the [module](super).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Nesterov {
    /// μ, in [0, 1).
    pub momentum: f64,
}

impl Default for Nesterov {
    fn default() -> Self {
        Self { momentum: 0.9 }
    }
}

impl Rule for Nesterov {
    fn name(&self) -> &'static str {
        "nesterov"
    }

    fn slots(&self, parameter: Extent<'_>) -> Vec<Slot> {
        Slot::like(parameter, &["momentum_buffer"])
    }

    fn check(&self) -> Result<()> {
        fraction("nesterov", "momentum", self.momentum)
    }

    fn update(&self, tensors: &Tensors<'_>, hyperparameters: Hyperparameters) -> Result<()> {
        let (buffers, grads) = (&tensors.slots[0], tensors.decayed(hyperparameters.weight_decay)?);
        foreach::mul_scalar_(buffers, self.momentum)?;
        foreach::add_(buffers, &grads)?;
        let ahead = foreach::add_scaled(&grads, buffers, self.momentum)?;
        Ok(foreach::add_scaled_(tensors.params, &ahead, -hyperparameters.lr)?)
    }
}
