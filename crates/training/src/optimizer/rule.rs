//! What one optimizer's mathematics is made of.

use std::fmt::Debug;

use runtime::ops::foreach;
use tch::Tensor;

use crate::error::{Error, Result};

/// What a step needs besides tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hyper {
    /// Learning rate of this step.
    pub lr: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Number of this step, from 1.
    pub step: u64,
}

/// The tensors of a step: parameters of one device, dtype (float or double) and step number, contiguous.
#[derive(Debug)]
pub struct Tensors<'a> {
    /// To be changed.
    pub params: &'a [Tensor],
    /// Not to be changed.
    pub grads: &'a [Tensor],
    /// For each of [`Rule::slots`], one tensor for each parameter.
    pub slots: &'a [Vec<Tensor>],
}

impl Tensors<'_> {
    /// The gradients with that of the L2 penalty λ/2·‖θ‖² added; the gradients themselves where λ is 0.
    ///
    /// # Errors
    /// Those of libtorch.
    pub fn decayed(&self, weight_decay: f64) -> Result<Vec<Tensor>> {
        if weight_decay == 0.0 {
            return Ok(self.grads.iter().map(Tensor::shallow_clone).collect());
        }
        Ok(foreach::add_scaled(self.grads, self.params, weight_decay)?)
    }
}

/// One optimizer's mathematics.
pub trait Rule: Debug + Send + Sync {
    /// Its name, as in `adam_w`.
    fn name(&self) -> &'static str;

    /// Names of the tensors it keeps for each parameter, each of the parameter's shape.
    fn slots(&self) -> &'static [&'static str];

    /// What the slots are filled with at first.
    fn initial(&self) -> f64 {
        0.0
    }

    /// # Errors
    /// A coefficient outside its range.
    fn check(&self) -> Result<()>;

    /// Changes the parameters and slots in place.
    ///
    /// # Errors
    /// Those of libtorch.
    fn update(&self, tensors: &Tensors<'_>, hyper: Hyper) -> Result<()>;

    /// [`Rule::update`] in one kernel. `steps` are float scalars, the steps done before this one, which the kernel raises;
    /// [`Hyper::step`] is not to be used. Where `skip`, a float scalar on the device, is 1, nothing is changed. `None` where
    /// there is no such kernel.
    fn fused(
        &self,
        tensors: &Tensors<'_>,
        steps: &[Tensor],
        hyper: Hyper,
        skip: Option<&Tensor>,
    ) -> Option<Result<()>> {
        let _ = (tensors, steps, hyper, skip);
        None
    }

    /// [`Rule::fused`] with gradients in their own dtype, which also writes each parameter's `weights`, where it has one: the
    /// parameter rounded to bf16 or fp16. `None`, with nothing changed, where there is no such kernel for these tensors.
    fn fused_mixed(
        &self,
        tensors: &Tensors<'_>,
        weights: &[Option<Tensor>],
        steps: &[Tensor],
        hyper: Hyper,
        skip: Option<&Tensor>,
    ) -> Option<Result<()>> {
        let _ = (tensors, weights, steps, hyper, skip);
        None
    }

    /// Whether [`Rule::fused`] does anything.
    fn has_fused(&self) -> bool {
        false
    }
}

/// An error unless `value` lies in `[0, 1)`.
pub(super) fn fraction(what: &'static str, name: &str, value: f64) -> Result<()> {
    if (0.0..1.0).contains(&value) {
        return Ok(());
    }
    Err(Error::config(what, format!("{name} is {value}; expected a number in [0, 1)")))
}

/// An error unless `value` is finite and not negative.
pub(super) fn not_negative(what: &'static str, name: &str, value: f64) -> Result<()> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(Error::config(what, format!("{name} is {value}; expected a finite number from 0 on")))
}
