//! RMSProp: s ← α·s + (1−α)·g²; θ ← θ − η·g / (√s + ε). Like AdaGrad, but averages over about 1/(1−α) steps. One slot.

use runtime::ops::foreach;

use super::rule::{Extent, Hyperparameters, Rule, Slot, Tensors, fraction, not_negative};
use crate::error::Result;

/// RMSProp (Tieleman & Hinton, 2012). See the [module](super).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsProp {
    /// α, in [0, 1).
    pub alpha: f64,
    /// ε, added to the root.
    pub eps: f64,
}

impl Default for RmsProp {
    fn default() -> Self {
        Self { alpha: 0.99, eps: 1e-8 }
    }
}

impl Rule for RmsProp {
    fn name(&self) -> &'static str {
        "rms_prop"
    }

    fn slots(&self, parameter: Extent<'_>) -> Vec<Slot> {
        Slot::like(parameter, &["square_avg"])
    }

    fn check(&self) -> Result<()> {
        fraction("rms_prop", "alpha", self.alpha)?;
        not_negative("rms_prop", "eps", self.eps)
    }

    fn update(&self, tensors: &Tensors<'_>, hyperparameters: Hyperparameters) -> Result<()> {
        let (squares, grads) = (&tensors.slots[0], tensors.decayed(hyperparameters.weight_decay)?);
        foreach::mul_scalar_(squares, self.alpha)?;
        foreach::addcmul_(squares, &grads, &grads, 1.0 - self.alpha)?;
        let roots = foreach::sqrt(squares)?;
        foreach::add_scalar_(&roots, self.eps)?;
        Ok(foreach::addcdiv_(tensors.params, &grads, &roots, -hyperparameters.lr)?)
    }
}
