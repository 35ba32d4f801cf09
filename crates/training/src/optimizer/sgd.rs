//! Stochastic gradient descent: θ ← θ − η·(g + λ·θ). No state.

use runtime::ops::foreach;

use super::rule::{Extent, Hyperparameters, Rule, Slot, Tensors};
use crate::error::Result;

/// Stochastic gradient descent (Robbins & Monro, 1951). See the [module](super).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sgd;

impl Rule for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn slots(&self, _: Extent<'_>) -> Vec<Slot> {
        Vec::new()
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn update(&self, tensors: &Tensors<'_>, hyperparameters: Hyperparameters) -> Result<()> {
        Ok(foreach::add_scaled_(
            tensors.params,
            &tensors.decayed(hyperparameters.weight_decay)?,
            -hyperparameters.lr,
        )?)
    }
}
