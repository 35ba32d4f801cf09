//! Where a loss scaler goes.
//!
//! A step with a scaler is: for each micro-batch, backward from [`GradScaler::scale`] of its loss; then once
//! [`GradScaler::unscale_`] over all gradients, which gives a flag on the device; the flag and the gradients' norm come to
//! the host in one copy, if either is wanted; then [`GradScaler::update`] with what the flag said, and the optimizer's step
//! unless it was set. A scaler that checks nothing gives no flag, and then there is nothing to wait for.
//!
//! Nor is there with a [`DeviceSide`] scaler. Then the flag stays on the device: clipping multiplies by a factor that is
//! computed there, the optimizer's kernel looks at the flag itself ([`DeviceOptimizer::step_unless`]), and
//! [`DeviceSide::update`] moves the scale there. What came of the steps is read together with their losses, several steps
//! at a time, and the records of a step are told no sooner than that.
//!
//! [`DeviceOptimizer::step_unless`]: crate::DeviceOptimizer::step_unless

use std::fmt::Debug;

use serde_json::Value;
use tch::Tensor;

use crate::clip::Norm;
use crate::error::{Error, Result};

/// Multiplies the loss so that small gradients survive low precision, and divides the gradients again.
pub trait GradScaler: Debug + Send {
    /// The loss to run backward from: times the scale.
    ///
    /// # Errors
    /// Those of libtorch.
    fn scale(&self, loss: &Tensor) -> Result<Tensor>;

    /// Divides the gradients by the scale in place, once for each step of the optimizer, and says what it learned on the way.
    /// `norm`: their norm is wanted; a scaler that has to read them anyway may give it. Waits for nothing.
    ///
    /// # Errors
    /// Those of libtorch.
    fn unscale_(&mut self, grads: &[Tensor], norm: bool) -> Result<Checked>;

    /// What comes of the step: whether a gradient was infinite or NaN, and the optimizer therefore passed it over.
    ///
    /// # Errors
    /// A scale that has fallen below what it may.
    fn update(&mut self, overflow: bool) -> Result<()>;

    /// Whether it scales at all, as `GradScaler.is_enabled` of PyTorch.
    fn is_enabled(&self) -> bool {
        true
    }

    /// The scale, for records. A [`DeviceSide`] scaler waits for it.
    fn current(&self) -> f64;

    /// What a checkpoint keeps.
    fn state(&self) -> Value;

    /// Goes on from what [`GradScaler::state`] gave.
    ///
    /// # Errors
    /// A state of another scaler.
    fn load_state(&mut self, state: &Value) -> Result<()>;

    /// The scaler as one that the host never waits for; `None` for one that decides on the host.
    fn device_side(&mut self) -> Option<&mut dyn DeviceSide> {
        None
    }
}

/// A scaler whose scale, and whose word on whether a step is taken, stay on the device.
pub trait DeviceSide {
    /// [`GradScaler::update`] by the flag that [`GradScaler::unscale_`] gave. Waits for nothing.
    ///
    /// # Errors
    /// Those of libtorch.
    fn update(&mut self, found_inf: &Tensor) -> Result<()>;

    /// Where it stands: fp64 `[1 or more]`, on its device, the scale first. Later updates leave this tensor alone.
    fn position(&self) -> Tensor;

    /// Takes note of a position that was read; those of all steps come in order.
    ///
    /// # Errors
    /// A scale that has fallen below what it may.
    fn learn(&mut self, position: &[f64]) -> Result<()>;
}

/// What unscaling learned of the gradients. Both are on their device still.
#[derive(Debug, Default)]
pub struct Checked {
    /// A float tensor of one element, 1 where a gradient is infinite or NaN, else 0; `None` where that is not checked.
    pub found_inf: Option<Tensor>,
    /// Their norm, divided by the scale; `None` where it is still to be computed.
    pub norm: Option<Norm>,
}

/// No scaling: for fp32 and bf16.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NoScaler;

impl GradScaler for NoScaler {
    fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok(loss.shallow_clone())
    }

    fn unscale_(&mut self, _grads: &[Tensor], _norm: bool) -> Result<Checked> {
        Ok(Checked::default())
    }

    fn update(&mut self, _overflow: bool) -> Result<()> {
        Ok(())
    }

    fn is_enabled(&self) -> bool {
        false
    }

    fn current(&self) -> f64 {
        1.0
    }

    fn state(&self) -> Value {
        Value::Null
    }

    fn load_state(&mut self, state: &Value) -> Result<()> {
        if state.is_null() {
            return Ok(());
        }
        let reason =
            format!("the checkpoint has the state {state}, but this run has no scaler; give it the same one");
        Err(Error::config("gradient scaler", reason))
    }
}
