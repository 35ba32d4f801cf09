//! SGD with heavy-ball momentum: m ← μ·m + g + λ·θ; θ ← θ − η·m, with m initially 0. One slot.

use runtime::ops::foreach;

use super::rule::{Extent, Hyperparameters, Rule, Slot, Tensors, fraction};
use crate::error::Result;

/// SGD with momentum (Polyak, 1964). See the [module](super).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Momentum {
    /// μ, in [0, 1).
    pub momentum: f64,
}

impl Default for Momentum {
    fn default() -> Self {
        Self { momentum: 0.9 }
    }
}

impl Rule for Momentum {
    fn name(&self) -> &'static str {
        "momentum"
    }

    fn slots(&self, parameter: Extent<'_>) -> Vec<Slot> {
        Slot::like(parameter, &["momentum_buffer"])
    }

    fn check(&self) -> Result<()> {
        fraction("momentum", "momentum", self.momentum)
    }

    fn update(&self, tensors: &Tensors<'_>, hyperparameters: Hyperparameters) -> Result<()> {
        let buffers = &tensors.slots[0];
        foreach::mul_scalar_(buffers, self.momentum)?;
        foreach::add_(buffers, &tensors.decayed(hyperparameters.weight_decay)?)?;
        Ok(foreach::add_scaled_(tensors.params, buffers, -hyperparameters.lr)?)
    }
}
