//! The interface of loss scalers.
//!
//! A step with a scaler: for each micro-batch, backward from [`GradScaler::scale`] of its loss; once [`GradScaler::unscale_`]
//! over all gradients, which returns a flag on the device; the flag and the gradient norm are read in one copy, if either is
//! needed; then [`GradScaler::update`] with the flag, and the optimizer's step unless it was set. A scaler that checks nothing
//! returns no flag, and nothing is waited for.
//!
//! A [`DeviceGradScaler`] does not wait either. Its flag stays on the device: clipping multiplies by a factor that is computed
//! there, the optimizer's kernel reads the flag ([`DeviceOptimizer::step_unless`]), and [`DeviceGradScaler::update`] updates
//! the scale there. The outcomes of steps are read with their losses, several steps at a time.
//!
//! [`DeviceOptimizer::step_unless`]: crate::DeviceOptimizer::step_unless

use std::fmt::Debug;

use serde_json::Value;
use tch::{Device, Tensor};

use crate::clip::Norm;
use crate::error::{Error, Result};

/// Scales the loss so that small gradients survive low precision, and unscales the gradients.
pub trait GradScaler: Debug + Send {
    /// Returns the loss times the scale.
    ///
    /// # Errors
    /// Errors of libtorch.
    fn scale(&self, loss: &Tensor) -> Result<Tensor>;

    /// Divides the gradients by the scale in place, once per optimizer step. If `norm` is set, a scaler that reads the
    /// gradients anyway may return their norm. Does not synchronise.
    ///
    /// # Errors
    /// Errors of libtorch.
    fn unscale_(&mut self, grads: &[Tensor], norm: bool) -> Result<UnscaleResult>;

    /// Updates the scale; `overflow` is whether a gradient was infinite or NaN, and the step therefore skipped.
    ///
    /// # Errors
    /// A scale below its minimum.
    fn update(&mut self, overflow: bool) -> Result<()>;

    /// Whether it scales at all, as `GradScaler.is_enabled` in PyTorch.
    fn is_enabled(&self) -> bool {
        true
    }

    /// Returns the scale, for records. Synchronises with a [`DeviceGradScaler`].
    fn current(&self) -> f64;

    /// Returns the state, for a checkpoint.
    fn state(&self) -> Value;

    /// Restores a state from [`GradScaler::state`].
    ///
    /// # Errors
    /// A state of another scaler.
    fn load_state(&mut self, state: &Value) -> Result<()>;

    /// Returns whether [`GradScaler::device_scaler`] returns one.
    fn decides_on_device(&self) -> bool {
        false
    }

    /// Returns this scaler, in its state, as one that decides on `device` with the same bits; `None`, the default, if there is none. A
    /// [`Trainer`](crate::Trainer) takes it where a graph repeats the steps.
    ///
    /// # Errors
    /// A device that does not exist.
    fn on_device(&self, _device: Device) -> Result<Option<Box<dyn GradScaler>>> {
        Ok(None)
    }

    /// Returns the device interface; `None` for a scaler that decides on the host.
    fn device_scaler(&mut self) -> Option<&mut dyn DeviceGradScaler> {
        None
    }
}

/// A scaler that keeps its scale, and the decision whether to skip a step, on the device.
pub trait DeviceGradScaler {
    /// [`GradScaler::update`] by the flag from [`GradScaler::unscale_`]. Does not synchronise.
    ///
    /// # Errors
    /// Errors of libtorch.
    fn update(&mut self, found_inf: &Tensor) -> Result<()>;

    /// Returns its state: fp64 `[1 or more]`, on its device, the scale first. An update changes this tensor in place, so that a graph can
    /// repeat it.
    fn device_state(&self) -> Tensor;

    /// Takes over a state that was read; those of all steps arrive in order.
    ///
    /// # Errors
    /// A scale below its minimum.
    fn load_device_state(&mut self, state: &[f64]) -> Result<()>;
}

/// The result of unscaling. Both tensors are on their device.
#[derive(Debug, Default)]
pub struct UnscaleResult {
    /// A float tensor of one element: 1 if a gradient is infinite or NaN, else 0; `None` if not checked.
    pub found_inf: Option<Tensor>,
    /// The gradient norm, divided by the scale; `None` if not computed.
    pub norm: Option<Norm>,
}

/// No scaling: for fp32 and bf16.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NoScaler;

impl GradScaler for NoScaler {
    fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok(loss.shallow_clone())
    }

    fn unscale_(&mut self, _grads: &[Tensor], _norm: bool) -> Result<UnscaleResult> {
        Ok(UnscaleResult::default())
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
        let reason = format!(
            "the checkpoint has the scaler state {state}, but this run has no scaler; use the same scaler"
        );
        Err(Error::config("gradient scaler", reason))
    }
}
