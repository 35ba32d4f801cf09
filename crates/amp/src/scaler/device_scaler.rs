//! Loss scaling on the device, without synchronisation.
//!
//! The scale is a tensor on the device. The loss is multiplied by it there; unscaling divides by it and writes an overflow
//! flag. If the flag is set, the fused kernel of the optimizer leaves parameters, moments and step counts unchanged
//! ([`DeviceOptimizer::step_unless`]). The scale is updated there to the same bits as by the rule on the host, by a kernel
//! ([`DeviceRule::update_by_kernel`]) or by operators ([`DeviceRule::update_on_device`]). So the host can queue step after step.
//! PyTorch's `GradScaler` reads the flag of every optimizer in every step unless the optimizer is fused, and has no bounds, hysteresis or
//! limit of skipped steps.
//!
//! The host learns the scale late: [`DeviceScaler::read`] waits for it, and [`training::Trainer`] reads it with the losses of
//! several steps. A run that skips too many steps ends with an error at that read. The saved state is that of a [`Scaler`]:
//! each loads the checkpoint of the other.
//!
//! ```
//! use amp::{DeviceScaler, DynamicScalerConfig, DynamicRule};
//! use tch::{Device, Kind, Tensor};
//! use training::optimizer::{AdamW, Group, DeviceOptimizer};
//!
//! let w = Tensor::from_slice(&[3.0f32]).set_requires_grad(true);
//! let mut adam = DeviceOptimizer::new(AdamW::default(), vec![Group::new(vec![("w".into(), w.shallow_clone())], 0.5)])?;
//! let mut scaler = DeviceScaler::new(DynamicRule::new(DynamicScalerConfig::default())?, Device::Cpu)?;
//!
//! let loss = w.square().sum(Kind::Float) * f64::INFINITY;
//! runtime::autograd::backward(&[&scaler.scale(&loss)?])?;
//! scaler.step("adam", &mut adam)?; // unscales, checks for overflow, steps or skips
//! scaler.update()?;
//! assert_eq!(f32::try_from(&w)?, 3.0);
//! assert_eq!(scaler.read()?.current().scale, 32768.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use kernels::gradients::Unscaled;
use kernels::loss_scale::Updated;
use runtime::ops::TryScalar;
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use training::clip::Norm;
use training::optimizer::DeviceOptimizer;
use training::scaler::{DeviceGradScaler, UnscaleResult};

use super::per_optimizer_state::PerOptimizerState;
use super::{ScaleRule, Scaler, TRAINER, tagged, unscale_once, untagged};
use crate::error::Result;

/// A rule that can update its scale on a device.
pub trait DeviceRule: ScaleRule + Clone {
    /// Returns the state as numbers, the scale first.
    fn state_vector(&self) -> Vec<f64>;

    /// Returns the state after a step, computed by tensor operations from the current state (fp64) and the overflow flag
    /// (scalar bool). Same results as [`ScaleRule::update`], but never fails because of skipped steps.
    ///
    /// # Errors
    /// Errors of libtorch.
    fn update_on_device(&self, state: &Tensor, overflow: &Tensor) -> Result<Tensor>;

    /// As [`DeviceRule::update_on_device`] in one launch on a GPU, from a float `[1]` that is not 0 after an overflow; `None` if there is
    /// no such kernel.
    ///
    /// # Errors
    /// Errors of the driver.
    fn update_by_kernel(&self, _state: &Tensor, _found_inf: &Tensor) -> Result<Option<Updated>> {
        Ok(None)
    }

    /// Sets the state to numbers read from the device.
    ///
    /// # Errors
    /// Errors of [`ScaleRule::update`]: too many steps in a row overflowed.
    fn set_state_vector(&mut self, state: &[f64]) -> Result<()>;
}

/// A loss scaler that skips steps on the device. See the [module](self).
#[derive(Debug)]
pub struct DeviceScaler<R> {
    /// The state of the last read.
    rule: R,
    /// Fp64. Always the same tensor, so that a graph can repeat a step.
    state: Tensor,
    /// Fp32 `[2]`: the scale and its inverse, once the kernel of an update has computed them; then always the same tensor.
    factors: Option<Tensor>,
    optimizers: PerOptimizerState,
}

impl<R: DeviceRule> Scaler<R> {
    /// Moves the scaler to `device`: the scale lies there, and steps are skipped there. Gradients that were unscaled without
    /// a step are forgotten.
    ///
    /// # Errors
    /// The device does not exist.
    pub fn on_device(self, device: Device) -> Result<DeviceScaler<R>> {
        DeviceScaler::new(self.rule, device)
    }
}

impl<R: DeviceRule> DeviceScaler<R> {
    /// Creates a scaler whose scale lies on `device`, the device of the loss.
    ///
    /// # Errors
    /// The device does not exist.
    pub fn new(rule: R, device: Device) -> Result<Self> {
        let state = Tensor::f_from_slice(&rule.state_vector())?.f_to_device(device)?;
        Ok(Self { rule, state, factors: None, optimizers: PerOptimizerState::default() })
    }

    /// Returns the loss times the scale; see [`Scaler::scale`].
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        let scale = match &self.factors {
            Some(factors) => factors.f_select(0, 0)?,
            None => self.state.f_select(0, 0)?.f_to_kind(Kind::Float)?,
        };
        Ok(loss.f_mul(&scale.f_to_device(loss.device())?)?)
    }

    /// Divides the gradients of one optimizer by the scale; see [`Scaler::unscale_`].
    ///
    /// # Errors
    /// As [`Scaler::unscale_`].
    pub fn unscale_(&mut self, optimizer: &str, grads: &[Tensor], norm: bool) -> Result<Unscaled> {
        let inverse = match &self.factors {
            Some(factors) => factors.f_narrow(0, 1, 1)?,
            None => self.state.f_narrow(0, 0, 1)?.f_reciprocal()?.f_to_kind(Kind::Float)?,
        };
        unscale_once(&mut self.optimizers, optimizer, grads, &inverse, norm)
    }

    /// Steps an optimizer; the device skips the step if the gradients overflowed. Unscales the gradients first if
    /// [`DeviceScaler::unscale_`] was not called.
    ///
    /// # Errors
    /// An optimizer without a fused kernel ([`DeviceOptimizer::step_unless`]); an optimizer that has stepped; those of
    /// [`DeviceScaler::unscale_`].
    pub fn step(&mut self, name: &str, optimizer: &mut DeviceOptimizer) -> Result<()> {
        if !self.optimizers.is_unscaled(name) {
            let grads = optimizer.gradients()?;
            self.unscale_(name, &grads, false)?;
        }
        let found_inf = self.optimizers.step_on_device(name)?;
        optimizer.step_unless(&found_inf).inspect_err(|_| self.optimizers.undo_step(name))
    }

    /// Updates the scale. Call it once after all optimizers have stepped.
    ///
    /// # Errors
    /// No optimizer has stepped.
    pub fn update(&mut self) -> Result<()> {
        let flags = self.optimizers.take_flags()?;
        self.advance(&flags)
    }

    /// Waits for the device and returns the rule with its current scale.
    ///
    /// # Errors
    /// [`Error::Overflowed`](crate::Error::Overflowed): too many steps in a row overflowed.
    pub fn read(&mut self) -> Result<&R> {
        let state = runtime::ops::read(&self.state)?;
        self.rule.set_state_vector(&state)?;
        Ok(&self.rule)
    }

    /// Waits for the device and returns the state for a checkpoint, which a [`Scaler`] loads as well.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn state(&self) -> Result<Value> {
        let mut rule = self.rule.clone();
        // Too many skipped steps are an error of `read`, not of a checkpoint.
        let _ = rule.set_state_vector(&runtime::ops::read(&self.state)?);
        Ok(tagged(R::NAME, &rule.state()))
    }

    /// Restores a state returned by [`DeviceScaler::state`] or [`Scaler::state`].
    ///
    /// # Errors
    /// The state of another scaler.
    pub fn load_state(&mut self, state: &Value) -> Result<()> {
        self.rule.load_state(untagged(R::NAME, state)?)?;
        self.state = Tensor::f_from_slice(&self.rule.state_vector())?.f_to_device(self.state.device())?;
        self.factors = None;
        self.optimizers.clear();
        Ok(())
    }

    /// Updates the scale by the overflow flags of all optimizers, float `[1]` each.
    fn advance(&mut self, flags: &[Tensor]) -> Result<()> {
        let device = self.state.device();
        let found_inf = match flags {
            [flag] => flag.f_to_device(device)?.f_to_kind(Kind::Float)?.f_reshape([1])?,
            _ => {
                let mut overflow = Tensor::f_zeros([1], (Kind::Bool, device))?;
                for flag in flags {
                    // A NaN flag counts as an overflow.
                    overflow =
                        overflow.f_logical_or(&flag.f_to_device(device)?.f_reshape([1])?.try_ne(0)?)?;
                }
                overflow.f_to_kind(Kind::Float)?
            }
        };
        if let Some(Updated { state, factors }) = self.rule.update_by_kernel(&self.state, &found_inf)? {
            self.state.f_copy_(&state)?;
            match &mut self.factors {
                Some(old) => old.f_copy_(&factors)?,
                None => self.factors = Some(factors),
            }
            return Ok(());
        }
        let overflow = found_inf.f_reshape([] as [i64; 0])?.try_ne(0)?;
        let state = self.rule.update_on_device(&self.state, &overflow)?;
        self.state.f_copy_(&state)?;
        self.factors = None;
        Ok(())
    }
}

impl<R: DeviceRule> training::scaler::GradScaler for DeviceScaler<R> {
    fn scale(&self, loss: &Tensor) -> training::Result<Tensor> {
        DeviceScaler::scale(self, loss)
    }

    fn unscale_(&mut self, grads: &[Tensor], norm: bool) -> training::Result<UnscaleResult> {
        let Unscaled { found_inf, norm } = DeviceScaler::unscale_(self, TRAINER, grads, norm)?;
        Ok(UnscaleResult { found_inf: Some(found_inf), norm: norm.map(Norm::known) })
    }

    fn update(&mut self, overflow: bool) -> training::Result<()> {
        let flag = Tensor::from(f32::from(u8::from(overflow)));
        DeviceGradScaler::update(self, &flag)
    }

    fn current(&self) -> f64 {
        runtime::ops::read(&self.state).ok().and_then(|state| state.first().copied()).unwrap_or(f64::NAN)
    }

    /// Waits for the device. If that fails, returns the error as a state that no scaler loads.
    fn state(&self) -> Value {
        DeviceScaler::state(self).unwrap_or_else(|error| Value::String(error.to_string()))
    }

    fn load_state(&mut self, state: &Value) -> training::Result<()> {
        DeviceScaler::load_state(self, state)
    }

    fn decides_on_device(&self) -> bool {
        true
    }

    fn device_scaler(&mut self) -> Option<&mut dyn DeviceGradScaler> {
        Some(self)
    }
}

impl<R: DeviceRule> DeviceGradScaler for DeviceScaler<R> {
    fn update(&mut self, found_inf: &Tensor) -> training::Result<()> {
        self.optimizers.clear();
        self.advance(&[found_inf.shallow_clone()])
    }

    fn device_state(&self) -> Tensor {
        self.state.shallow_clone()
    }

    fn load_device_state(&mut self, state: &[f64]) -> training::Result<()> {
        self.rule.set_state_vector(state)
    }
}
