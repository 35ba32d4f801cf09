//! The update rule of an optimizer: θ, slots ← f(θ, ∇θ, slots, hyperparameters), over lists of tensors.
//!
//! Unlike `torch.optim.Optimizer`, a rule owns no state. The optimizer keeps the slots (Adam: `exp_avg` and `exp_avg_sq`) and groups the
//! parameters by device, dtype and step number, so that a rule is a few calls of [`foreach`] or one fused kernel.

use std::fmt::Debug;

use runtime::ops::foreach;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};

/// The update rule of an optimizer.
pub trait Rule: Debug + Send + Sync {
    /// The rule's name, such as `adam_w`.
    fn name(&self) -> &'static str;

    /// Returns the state tensors of a parameter, which are named once. They depend on its shape alone.
    fn slots(&self, parameter: Extent<'_>) -> Vec<Slot>;

    /// The initial value of the slots.
    fn initial(&self) -> f64 {
        0.0
    }

    /// Checks the rule's coefficients.
    ///
    /// # Errors
    /// A coefficient outside its range.
    fn check(&self) -> Result<()>;

    /// Checks a parameter that the rule is to update, by its name in errors.
    ///
    /// # Errors
    /// A parameter for which the rule is not defined.
    fn check_parameter(&self, name: &str, parameter: &Tensor) -> Result<()> {
        let _ = (name, parameter);
        Ok(())
    }

    /// Returns the elements, consecutive in memory, at whose multiples a parameter may be divided among ranks so that its parts get the bits
    /// of the whole; `None` if each element's update depends on all others.
    fn granularity(&self) -> Option<i64> {
        Some(1)
    }

    /// Updates the parameters and slots in place.
    ///
    /// # Errors
    /// Errors of libtorch.
    fn update(&self, tensors: &Tensors<'_>, hyperparameters: Hyperparameters) -> Result<()>;

    /// Runs a step with a fused kernel, and writes [`FusedStep::weights`]. `None`, with nothing changed, without such a kernel.
    fn fused(&self, step: &FusedStep<'_>) -> Option<Result<()>> {
        let _ = step;
        None
    }

    /// Returns whether [`Rule::fused`] has a kernel.
    fn has_fused(&self) -> bool {
        false
    }
}

/// The shape of a parameter, or of a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent<'a> {
    /// Sizes of the tensor that is updated; of a part its elements.
    pub shape: &'a [i64],
    /// Elements of the whole parameter.
    pub whole: i64,
}

impl<'a> Extent<'a> {
    /// Returns the extent of a whole parameter.
    pub fn of(shape: &'a [i64]) -> Self {
        Self { shape, whole: shape.iter().product() }
    }

    /// Returns the elements of the tensor that is updated.
    pub fn elements(&self) -> i64 {
        self.shape.iter().product()
    }
}

/// A state tensor of a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// The name in checkpoints, after the parameter's.
    pub name: &'static str,
    /// Sizes.
    pub shape: Vec<i64>,
    /// The dtype; `None` for that of the arithmetic, which is fp32, or fp64 for an fp64 parameter.
    pub kind: Option<Kind>,
    /// Elements of the parameter for each of the slot's values, where both are divided among ranks: 1, or those of a block.
    pub elements_per_value: i64,
}

impl Slot {
    /// Returns a slot in the dtype of the arithmetic.
    pub fn of(name: &'static str, shape: impl Into<Vec<i64>>) -> Self {
        Self { name, shape: shape.into(), kind: None, elements_per_value: 1 }
    }

    /// Returns slots of the parameter's shape, in the dtype of the arithmetic.
    pub fn like(parameter: Extent<'_>, names: &[&'static str]) -> Vec<Self> {
        names.iter().map(|name| Self::of(name, parameter.shape)).collect()
    }

    /// Returns the dtype in the state of a parameter whose arithmetic has the dtype `work`.
    pub fn kind_or(&self, work: Kind) -> Kind {
        self.kind.unwrap_or(work)
    }

    /// Returns the bytes in the state of a parameter whose arithmetic has the dtype `work`.
    pub fn bytes(&self, work: Kind) -> u64 {
        let values: u64 = self.shape.iter().map(|size| size.unsigned_abs()).product();
        values * self.kind_or(work).elt_size_in_bytes() as u64
    }
}

/// Hyperparameters of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hyperparameters {
    /// Learning rate of this step.
    pub lr: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// The step number, from 1.
    pub step: u64,
}

/// The tensors of a step: parameters of one device, dtype (float or double), step number and names of slots, contiguous.
#[derive(Debug)]
pub struct Tensors<'a> {
    /// Parameters, updated in place.
    pub params: &'a [&'a Tensor],
    /// Gradients, not changed.
    pub grads: &'a [&'a Tensor],
    /// For each of [`Rule::slots`], one tensor per parameter, contiguous.
    pub slots: &'a [Vec<&'a Tensor>],
}

impl Tensors<'_> {
    /// Returns the gradients plus that of the L2 penalty λ/2·‖θ‖²; the gradients themselves if λ is 0.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn decayed(&self, weight_decay: f64) -> Result<Vec<Tensor>> {
        if weight_decay == 0.0 {
            return Ok(self.grads.iter().map(|grad| grad.shallow_clone()).collect());
        }
        Ok(foreach::add_scaled(self.grads, self.params, weight_decay)?)
    }
}

/// A step of a fused kernel.
#[derive(Debug)]
pub struct FusedStep<'a> {
    /// The tensors, with gradients in their own dtypes.
    pub tensors: Tensors<'a>,
    /// For each parameter that is a master copy or a cast, the model's tensor, which gets the rounded parameter.
    pub weights: &'a [Option<Tensor>],
    /// For each parameter its number of completed steps, a float scalar on the device, which the kernel increments.
    pub steps: &'a [&'a Tensor],
    /// The hyperparameters; the kernel reads `steps` instead of [`Hyperparameters::step`].
    pub hyperparameters: Hyperparameters,
    /// The learning rate in an fp64 scalar on the device, for a step that a graph repeats: the kernel reads it instead of
    /// [`Hyperparameters::lr`].
    pub rate: Option<&'a Tensor>,
    /// A float scalar on the device; if it is 1, the kernel changes nothing.
    pub skip: Option<&'a Tensor>,
}

/// Casts gradients to the dtype of `params`, which all have one; `None` if they have it.
pub(super) fn cast_gradients(params: &[&Tensor], grads: &[&Tensor]) -> Result<Option<Vec<Tensor>>> {
    let Some(kind) = params.first().map(|param| param.kind()) else { return Ok(None) };
    if grads.iter().all(|grad| grad.kind() == kind) {
        return Ok(None);
    }
    let casts = grads.iter().map(|grad| grad.f_to_kind(kind));
    Ok(Some(casts.collect::<Result<_, _>>()?))
}

/// Rounds each parameter to its tensor in `weights`.
pub(super) fn write_weights(weights: &[Option<Tensor>], params: &[&Tensor]) -> Result<()> {
    let rounded = weights.iter().zip(params).filter_map(|(weight, param)| Some((weight.as_ref()?, *param)));
    let (targets, sources): (Vec<&Tensor>, Vec<&Tensor>) = rounded.unzip();
    Ok(foreach::copy_(&targets, &sources)?)
}

/// Refuses a value outside `[0, 1)`.
pub(super) fn fraction(what: &'static str, name: &str, value: f64) -> Result<()> {
    if (0.0..1.0).contains(&value) {
        return Ok(());
    }
    Err(Error::config(what, format!("{name} is {value}; expected a number in [0, 1)")))
}

/// Refuses a negative or non-finite value.
pub(super) fn not_negative(what: &'static str, name: &str, value: f64) -> Result<()> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(Error::config(what, format!("{name} is {value}; expected a finite number of at least 0")))
}
