//! Loss scaling: keeps small gradients above the underflow threshold of fp16.
//!
//! fp16 has no number between 0 and 2⁻²⁴ ≈ 6·10⁻⁸, and most gradients of a network are many orders of magnitude smaller than
//! its loss. Backward is linear in the upstream gradient: from s·L it computes s·g. So the loss is multiplied by s, the
//! gradients are divided by s in fp32 before they are clipped or used, and a step is skipped if s·g exceeded 65504, the
//! largest number of fp16 (Micikevicius et al., arXiv:1710.03740).
//!
//! [`StaticGradScaler`] has a constant s. [`DynamicGradScaler`] lowers s at an overflow and raises it after a number of steps
//! without one ([`dynamic_scale`]). Both are a [`Scaler`] over a [`ScaleRule`]; [`training::Trainer`] accepts either. In a
//! training loop of your own, with any number of optimizers:
//!
//! ```
//! use amp::{DynamicGradScaler, DynamicScalerConfig};
//! use tch::{Device, Kind, Tensor};
//! use training::optimizer::{Group, DeviceOptimizer, Sgd};
//!
//! let w = Tensor::from_slice(&[3.0f32]).set_requires_grad(true);
//! let mut sgd = DeviceOptimizer::new(Sgd, vec![Group::new(vec![("w".into(), w.shallow_clone())], 0.5)])?;
//! let mut scaler = DynamicGradScaler::new(DynamicScalerConfig::default())?;
//!
//! let loss = w.square().sum(Kind::Float);
//! runtime::autograd::backward(&[&scaler.scale(&loss)?])?;
//! assert!(scaler.step("sgd", &mut sgd)?); // unscales, checks for overflow, steps
//! scaler.update()?;
//! assert_eq!(f32::try_from(&w)?, 0.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Between two updates the gradients of each optimizer are unscaled once (clip them after that), and each optimizer steps
//! once. A call out of this order is an error with the remedy. One pass unscales the gradients, checks them, and computes
//! their norm ([`kernels::gradients`]). On CUDA the overflow flags of all optimizers are copied to the host at once; a
//! [`DeviceScaler`](device_scaler::DeviceScaler) follows the same rules, skips steps on the device, and copies nothing.
//! It pays on a GPU, where the host would wait for the flag in every step; on a CPU its small operators cost more than the host's decision.
//! A trainer takes it by itself where a graph repeats the steps ([`training::trainer::captured`]).

pub mod device_scaler;
pub mod dynamic_scale;
mod per_optimizer_state;
pub mod static_scale;

use std::fmt::Debug;

use kernels::gradients::{Unscaled, unscale_};
use runtime::ops::TryScalar;
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use training::clip::Norm;
use training::optimizer::DeviceOptimizer;
use training::scaler::{GradScaler, UnscaleResult};

use crate::error::{Result, foreign_state, refused};
use dynamic_scale::{DynamicRule, DynamicScalerConfig};
use per_optimizer_state::PerOptimizerState;
use static_scale::StaticRule;

/// A rule for the scale: its value, and how it changes after a step.
pub trait ScaleRule: Debug + Send {
    /// The name in errors, and the `kind` of a saved state.
    const NAME: &'static str;

    /// Returns the current scale.
    fn scale(&self) -> f32;

    /// Updates the scale after a step.
    ///
    /// # Errors
    /// [`Error::Overflowed`](crate::Error::Overflowed) if too many steps in a row overflowed.
    fn update(&mut self, overflow: bool) -> Result<()>;

    /// Returns the state for a checkpoint.
    fn state(&self) -> Value;

    /// Restores a state returned by [`ScaleRule::state`].
    ///
    /// # Errors
    /// The state of another scaler.
    fn load_state(&mut self, state: &Value) -> Result<()>;

    /// Returns a scaler of this rule that decides on `device`; `None`, the default, for a rule that the host alone can apply.
    ///
    /// # Errors
    /// The device does not exist.
    fn scaler_on_device(&self, _device: Device) -> Result<Option<Box<dyn GradScaler>>> {
        Ok(None)
    }
}

/// A loss scaler. See the [module](self).
#[derive(Debug)]
pub struct Scaler<R> {
    rule: R,
    optimizers: PerOptimizerState,
}

/// A loss scaler with a constant scale.
pub type StaticGradScaler = Scaler<StaticRule>;

/// A loss scaler whose scale adapts to the gradients, as `torch.amp.GradScaler`.
pub type DynamicGradScaler = Scaler<DynamicRule>;

impl StaticGradScaler {
    /// Creates a scaler with a constant scale.
    ///
    /// # Errors
    /// A scale that is not finite or not above 0.
    pub fn new(scale: f32) -> Result<Self> {
        Ok(Self::with_rule(StaticRule::new(scale)?))
    }
}

impl DynamicGradScaler {
    /// Creates a scaler whose scale starts at `options.init_scale`.
    ///
    /// # Errors
    /// An option outside its range.
    pub fn new(options: DynamicScalerConfig) -> Result<Self> {
        Ok(Self::with_rule(DynamicRule::new(options)?))
    }
}

impl<R: ScaleRule> Scaler<R> {
    /// Creates a scaler with a custom rule.
    pub fn with_rule(rule: R) -> Self {
        Self { rule, optimizers: PerOptimizerState::default() }
    }

    /// Returns the rule and its scale.
    pub fn rule(&self) -> &R {
        &self.rule
    }

    /// Returns the loss times the scale; call backward on it. All losses of a step, micro-batches included, have the same
    /// scale: only [`Scaler::update`] changes it.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok(loss.try_mul_scalar(f64::from(self.rule.scale()))?)
    }

    /// Divides the gradients of one optimizer by the scale, in place, and records whether one of them is infinite or NaN.
    /// Does not wait for the device. `norm` also computes their 2-norm, at no cost on the CPU.
    ///
    /// # Errors
    /// Gradients that are unscaled, an optimizer that has stepped, gradients in fp16, before any gradient is changed; those of
    /// [`unscale_`].
    pub fn unscale_(&mut self, optimizer: &str, grads: &[Tensor], norm: bool) -> Result<Unscaled> {
        // As in PyTorch: 1/s in fp64, rounded to fp32.
        let inverse = Tensor::f_from_slice(&[(1.0 / f64::from(self.rule.scale())) as f32])?;
        unscale_once(&mut self.optimizers, optimizer, grads, &inverse, norm)
    }

    /// Steps an optimizer unless its gradients overflowed, and returns whether it stepped. Unscales the gradients first if
    /// [`Scaler::unscale_`] was not called. Skips parameters without a gradient and frozen ones, as the optimizer does.
    ///
    /// # Errors
    /// An optimizer that has stepped; those of [`Scaler::unscale_`] and of the optimizer.
    pub fn step(&mut self, name: &str, optimizer: &mut DeviceOptimizer) -> Result<bool> {
        if !self.optimizers.is_unscaled(name) {
            let grads = optimizer.gradients()?;
            self.unscale_(name, &grads, false)?;
        }
        let taken = self.optimizers.step(name)?;
        if taken {
            optimizer.step().inspect_err(|_| self.optimizers.undo_step(name))?;
        }
        Ok(taken)
    }

    /// Updates the scale. Call it once after all optimizers have stepped. Returns whether any of them overflowed.
    ///
    /// # Errors
    /// No optimizer has stepped; those of [`ScaleRule::update`].
    pub fn update(&mut self) -> Result<bool> {
        let overflow = self.optimizers.take_overflow()?;
        self.rule.update(overflow)?;
        Ok(overflow)
    }

    /// Returns the state for a checkpoint. It is complete after an update.
    pub fn state(&self) -> Value {
        tagged(R::NAME, &self.rule.state())
    }

    /// Restores a state returned by [`Scaler::state`].
    ///
    /// # Errors
    /// The state of another scaler.
    pub fn load_state(&mut self, state: &Value) -> Result<()> {
        self.rule.load_state(untagged(R::NAME, state)?)?;
        self.optimizers.clear();
        Ok(())
    }
}

/// Multiplies the gradients of an optimizer by `inverse`, an fp32 tensor `[1]`, unless they are unscaled already.
fn unscale_once(
    optimizers: &mut PerOptimizerState,
    optimizer: &str,
    grads: &[Tensor],
    inverse: &Tensor,
    norm: bool,
) -> Result<Unscaled> {
    optimizers.check_unscale(optimizer)?;
    if let Some(index) = grads.iter().position(|grad| grad.kind() == Kind::Half) {
        return Err(refused(format!(
            "gradient {index} of optimizer `{optimizer}` is fp16; dividing it by the scale would bring back the underflow that scaling \
             prevents, with or without master weights. Keep the parameters in fp32 and let autocast cast them, or use bf16 parameters, \
             which need no scaler"
        )));
    }
    let inverse = match grads.first() {
        Some(grad) => inverse.f_to_device(grad.device())?,
        None => inverse.shallow_clone(),
    };
    let unscaled = unscale_(grads, &inverse, norm)?;
    optimizers.mark_unscaled(optimizer, Some(unscaled.found_inf.shallow_clone()));
    Ok(unscaled)
}

/// Tags a state with the name of its scaler.
fn tagged(name: &str, state: &Value) -> Value {
    serde_json::json!({ "kind": name, "state": state })
}

/// Returns the state inside a [`tagged`] one, if the name matches.
fn untagged<'a>(name: &'static str, state: &'a Value) -> Result<&'a Value> {
    if state["kind"] == name {
        return Ok(&state["state"]);
    }
    Err(foreign_state(state, name, "its `kind` differs"))
}

/// The name of the one optimizer of `training::Trainer`.
const TRAINER: &str = "training";

impl<R: ScaleRule> GradScaler for Scaler<R> {
    fn scale(&self, loss: &Tensor) -> training::Result<Tensor> {
        Scaler::scale(self, loss)
    }

    fn unscale_(&mut self, grads: &[Tensor], norm: bool) -> training::Result<UnscaleResult> {
        let Unscaled { found_inf, norm } = Scaler::unscale_(self, TRAINER, grads, norm)?;
        Ok(UnscaleResult { found_inf: Some(found_inf), norm: norm.map(Norm::known) })
    }

    fn update(&mut self, overflow: bool) -> training::Result<()> {
        // The trainer has read the flag, in one copy with the norm.
        self.optimizers.clear();
        self.rule.update(overflow)
    }

    fn current(&self) -> f64 {
        self.rule.scale().into()
    }

    fn state(&self) -> Value {
        Scaler::state(self)
    }

    fn load_state(&mut self, state: &Value) -> training::Result<()> {
        Scaler::load_state(self, state)
    }

    fn on_device(&self, device: Device) -> training::Result<Option<Box<dyn GradScaler>>> {
        self.rule.scaler_on_device(device)
    }
}
