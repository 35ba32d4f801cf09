//! AdaGrad: s ← s + g²; θ ← θ − η·g / (√s + ε). A coordinate's effective rate decreases with its accumulated squared gradients.
//! One slot.

use runtime::ops::foreach;

use super::rule::{Extent, Hyperparameters, Rule, Slot, Tensors, not_negative};
use crate::error::Result;

/// AdaGrad (Duchi, Hazan & Singer, 2011). See the [module](super).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdaGrad {
    /// The initial s.
    pub initial_accumulator: f64,
    /// η at step t is divided by 1 + (t − 1)·`lr_decay`.
    pub lr_decay: f64,
    /// ε, added to the root.
    pub eps: f64,
}

impl Default for AdaGrad {
    fn default() -> Self {
        Self { initial_accumulator: 0.0, lr_decay: 0.0, eps: 1e-10 }
    }
}

impl Rule for AdaGrad {
    fn name(&self) -> &'static str {
        "adagrad"
    }

    fn slots(&self, parameter: Extent<'_>) -> Vec<Slot> {
        Slot::like(parameter, &["sum"])
    }

    fn initial(&self) -> f64 {
        self.initial_accumulator
    }

    fn check(&self) -> Result<()> {
        not_negative("adagrad", "initial_accumulator", self.initial_accumulator)?;
        not_negative("adagrad", "lr_decay", self.lr_decay)?;
        not_negative("adagrad", "eps", self.eps)
    }

    fn update(&self, tensors: &Tensors<'_>, hyperparameters: Hyperparameters) -> Result<()> {
        let (sums, grads) = (&tensors.slots[0], tensors.decayed(hyperparameters.weight_decay)?);
        foreach::addcmul_(sums, &grads, &grads, 1.0)?;
        let roots = foreach::sqrt(sums)?;
        foreach::add_scalar_(&roots, self.eps)?;
        let lr = hyperparameters.lr / (1.0 + (hyperparameters.step - 1) as f64 * self.lr_decay);
        Ok(foreach::addcdiv_(tensors.params, &grads, &roots, -lr)?)
    }
}
