//! Loss scaling, so that gradients too small for fp16 survive it.
//!
//! fp16 has no number between 0 and 2⁻²⁴ ≈ 6·10⁻⁸, and most gradients of a trained network are smaller than its loss by many
//! orders. Backward is linear in the upstream gradient: from s·L it gives s·g. So the loss is multiplied by s, every
//! gradient divided by s in fp32 before anything looks at its size, and a step is left out when s·g was beyond fp16's 65504
//! (Micikevicius et al., arXiv:1710.03740).
//!
//! [`StaticGradScaler`] keeps s. [`DynamicGradScaler`] lets it fall at an overflow and grow after many steps without
//! ([`dynamic_scale`]). Both are one [`Scaler`] over a [`ScaleRule`], and go into [`training::Trainer`] as they are. By hand,
//! with any number of optimizers:
//!
//! ```
//! use amp::{DynamicGradScaler, DynamicOptions};
//! use tch::{Kind, Tensor};
//! use training::optimizer::{Group, Optimizer, Sgd};
//!
//! let w = Tensor::from_slice(&[3.0f32]).set_requires_grad(true);
//! let mut sgd = Optimizer::new(Sgd, vec![Group::new(vec![("w".into(), w.shallow_clone())], 0.5)])?;
//! let mut scaler = DynamicGradScaler::new(DynamicOptions::default())?;
//!
//! let loss = w.square().sum(Kind::Float);
//! runtime::autograd::backward(&[&scaler.scale(&loss)?])?;
//! assert!(scaler.step("sgd", &mut sgd)?); // unscales, checks, steps
//! scaler.update()?;
//! assert_eq!(f32::try_from(&w)?, 0.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Between two updates each optimizer's gradients are unscaled once (clip after that), and each steps once; what is out of
//! order is an error that says what to do. Gradients are scaled, checked and measured in one pass
//! ([`runtime::fused::gradients`]). On CUDA the flags come to the host in one copy, however many optimizers there are; or not
//! at all: a [`DeviceScaler`](device_scaler::DeviceScaler) takes the same rules and leaves steps out on the device.

pub mod device_scaler;
pub mod dynamic_scale;
mod ledger;
pub mod static_scale;

use std::fmt::Debug;

use runtime::fused::gradients::{Unscaled, unscale_};
use serde_json::Value;
use tch::{Kind, Tensor};
use training::clip::Norm;
use training::optimizer::Optimizer;
use training::scaler::Checked;

use crate::error::{Error, Result};
use dynamic_scale::{DynamicOptions, DynamicRule};
use ledger::Ledger;
use static_scale::StaticRule;

/// How a scale moves.
pub trait ScaleRule: Debug + Send {
    /// For errors, and the `kind` of a state.
    const NAME: &'static str;

    /// The scale now.
    fn scale(&self) -> f32;

    /// Moves on by a step.
    ///
    /// # Errors
    /// [`Error::Exhausted`].
    fn update(&mut self, overflow: bool) -> Result<()>;

    /// All that moves.
    fn state(&self) -> Value;

    /// Goes on from what [`ScaleRule::state`] gave.
    ///
    /// # Errors
    /// [`Error::State`].
    fn load_state(&mut self, state: &Value) -> Result<()>;
}

/// A loss scaler. See the [module](self).
#[derive(Debug)]
pub struct Scaler<R> {
    rule: R,
    ledger: Ledger,
}

/// One scale for the whole training.
pub type StaticGradScaler = Scaler<StaticRule>;

/// A scale that follows the gradients.
pub type DynamicGradScaler = Scaler<DynamicRule>;

impl StaticGradScaler {
    /// A scale that stays.
    ///
    /// # Errors
    /// [`Error::Option`] for a scale that is not finite or not above 0.
    pub fn new(scale: f32) -> Result<Self> {
        Ok(Self::with_rule(StaticRule::new(scale)?))
    }
}

impl DynamicGradScaler {
    /// A scale that begins at `options.initial`.
    ///
    /// # Errors
    /// [`Error::Option`] for constants that no scale can move by.
    pub fn new(options: DynamicOptions) -> Result<Self> {
        Ok(Self::with_rule(DynamicRule::new(options)?))
    }
}

impl<R: ScaleRule> Scaler<R> {
    /// A scaler whose scale moves by a rule of one's own.
    pub fn with_rule(rule: R) -> Self {
        Self { rule, ledger: Ledger::default() }
    }

    /// The rule, with its scale.
    pub fn rule(&self) -> &R {
        &self.rule
    }

    /// The loss times the scale, to run backward from. Several losses of one step, and those of micro-batches, are all
    /// multiplied by the same scale: it moves only at an update.
    ///
    /// # Errors
    /// Those of libtorch.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok(loss.f_mul_scalar(f64::from(self.rule.scale()))?)
    }

    /// Divides the gradients of one optimizer by the scale, in place, and notes whether one of them is infinite or NaN.
    /// Nothing is waited for. `norm` asks for their 2-norm as well, which costs nothing on the CPU.
    ///
    /// # Errors
    /// [`Error::UnscaledTwice`], [`Error::SteppedTwice`], [`Error::HalfGradients`], before any gradient is touched; those of
    /// [`unscale_`].
    pub fn unscale_(&mut self, optimizer: &str, grads: &[Tensor], norm: bool) -> Result<Unscaled> {
        // As PyTorch: 1/s in fp64, rounded to fp32.
        let inverse = Tensor::f_from_slice(&[(1.0 / f64::from(self.rule.scale())) as f32])?;
        unscale_once(&mut self.ledger, optimizer, grads, &inverse, norm)
    }

    /// One step of an optimizer, unless its gradients overflowed: whether it was taken. Unscales first where that was not
    /// done. Parameters without a gradient, and frozen ones, are left out as the optimizer leaves them out.
    ///
    /// # Errors
    /// [`Error::SteppedTwice`]; those of [`Scaler::unscale_`] and of the optimizer.
    pub fn step(&mut self, name: &str, optimizer: &mut Optimizer) -> Result<bool> {
        if !self.ledger.is_unscaled(name) {
            let grads = optimizer.gradients()?;
            self.unscale_(name, &grads, false)?;
        }
        let taken = self.ledger.step(name)?;
        if taken {
            optimizer.step().inspect_err(|_| self.ledger.take_back(name))?;
        }
        Ok(taken)
    }

    /// Moves the scale, once after all optimizers have stepped: by an overflow if any of them had one. Returns whether.
    ///
    /// # Errors
    /// [`Error::NothingStepped`]; [`Error::Exhausted`].
    pub fn update(&mut self) -> Result<bool> {
        let overflow = self.ledger.settle()?;
        self.rule.update(overflow)?;
        Ok(overflow)
    }

    /// What a checkpoint keeps: between two updates there is nothing else to keep.
    pub fn state(&self) -> Value {
        named(R::NAME, &self.rule.state())
    }

    /// Goes on from what [`Scaler::state`] gave.
    ///
    /// # Errors
    /// [`Error::State`] for that of another scaler.
    pub fn load_state(&mut self, state: &Value) -> Result<()> {
        self.rule.load_state(unnamed(R::NAME, state)?)?;
        self.ledger.clear();
        Ok(())
    }
}

/// Multiplies the gradients of an optimizer by `inverse`, a float tensor `[1]`, if they may be unscaled now.
fn unscale_once(
    ledger: &mut Ledger,
    optimizer: &str,
    grads: &[Tensor],
    inverse: &Tensor,
    norm: bool,
) -> Result<Unscaled> {
    ledger.may_unscale(optimizer)?;
    if let Some(index) = grads.iter().position(|grad| grad.kind() == Kind::Half) {
        return Err(Error::HalfGradients { optimizer: optimizer.into(), index });
    }
    let inverse = match grads.first() {
        Some(grad) => inverse.f_to_device(grad.device())?,
        None => inverse.shallow_clone(),
    };
    let unscaled = unscale_(grads, &inverse, norm)?;
    ledger.unscaled(optimizer, Some(unscaled.found_inf.shallow_clone()));
    Ok(unscaled)
}

/// A state with its scaler's name.
fn named(name: &str, state: &Value) -> Value {
    serde_json::json!({ "kind": name, "state": state })
}

/// What [`named`] took, if it is of this scaler.
fn unnamed<'a>(name: &'static str, state: &'a Value) -> Result<&'a Value> {
    if state["kind"] == name {
        return Ok(&state["state"]);
    }
    let reason = "it is of another kind".into();
    Err(Error::State { found: state.to_string(), expected: name, reason })
}

/// The name of the loop's one optimizer.
const LOOP: &str = "training";

impl<R: ScaleRule> training::scaler::GradScaler for Scaler<R> {
    fn scale(&self, loss: &Tensor) -> training::Result<Tensor> {
        Scaler::scale(self, loss).map_err(to_training)
    }

    fn unscale_(&mut self, grads: &[Tensor], norm: bool) -> training::Result<Checked> {
        let Unscaled { found_inf, norm } = Scaler::unscale_(self, LOOP, grads, norm).map_err(to_training)?;
        Ok(Checked { found_inf: Some(found_inf), norm: norm.map(Norm::known) })
    }

    fn update(&mut self, overflow: bool) -> training::Result<()> {
        // The loop has read the flag, in one copy with the norm.
        self.ledger.clear();
        self.rule.update(overflow).map_err(to_training)
    }

    fn current(&self) -> f64 {
        self.rule.scale().into()
    }

    fn state(&self) -> Value {
        Scaler::state(self)
    }

    fn load_state(&mut self, state: &Value) -> training::Result<()> {
        Scaler::load_state(self, state).map_err(to_training)
    }
}

fn to_training(error: Error) -> training::Error {
    match error {
        Error::Training(error) => error,
        Error::Runtime(error) => error.into(),
        Error::Torch(error) => error.into(),
        other => {
            let (what, text) = ("gradient scaler", other.to_string());
            let reason = text.strip_prefix(what).and_then(|text| text.strip_prefix(": ")).unwrap_or(&text);
            training::Error::Config { what, reason: reason.to_owned() }
        }
    }
}
