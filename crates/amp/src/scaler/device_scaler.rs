//! Loss scaling that never waits for the device.
//!
//! The scale is a tensor on the device. The loss is multiplied by it there; unscaling divides by it and leaves a flag; the
//! optimizer's fused kernel looks at the flag and leaves parameters, moments and step numbers as they are where it is set
//! ([`Optimizer::step_unless`]); and the scale moves by tensor operations that give, bit for bit, what the rule gives on the
//! host ([`DeviceRule::moved`]). So the host may queue step after step. PyTorch's `GradScaler` reads the flag of every
//! optimizer in every step, unless the optimizer is a fused one, and keeps no bounds, hysteresis or patience.
//!
//! What is known on the host is late: [`DeviceScaler::read`] says where the scale stands, and in the loop
//! [`training::Trainer`] reads it along with the losses, several steps at a time. A run whose gradients no scale helps ends
//! as soon as that is read. The state is that of the scaler that decides on the host, so that either goes on from the
//! other's checkpoint.
//!
//! ```
//! use amp::{DeviceScaler, DynamicOptions, DynamicRule};
//! use tch::{Device, Kind, Tensor};
//! use training::optimizer::{AdamW, Group, Optimizer};
//!
//! let w = Tensor::from_slice(&[3.0f32]).set_requires_grad(true);
//! let mut adam = Optimizer::new(AdamW::default(), vec![Group::new(vec![("w".into(), w.shallow_clone())], 0.5)])?;
//! let mut scaler = DeviceScaler::new(DynamicRule::new(DynamicOptions::default())?, Device::Cpu)?;
//!
//! let loss = w.square().sum(Kind::Float) * f64::INFINITY;
//! runtime::autograd::backward(&[&scaler.scale(&loss)?])?;
//! scaler.step("adam", &mut adam)?; // unscales, checks, steps or not
//! scaler.update()?;
//! assert_eq!(f32::try_from(&w)?, 3.0);
//! assert_eq!(scaler.read()?.now().scale, 32768.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use runtime::fused::gradients::Unscaled;
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use training::clip::Norm;
use training::optimizer::Optimizer;
use training::scaler::{Checked, DeviceSide};

use super::ledger::Ledger;
use super::{LOOP, ScaleRule, Scaler, named, to_training, unnamed, unscale_once};
use crate::error::Result;

/// A rule that can move its scale on a device.
pub trait DeviceRule: ScaleRule + Clone {
    /// All that moves, the scale first.
    fn position(&self) -> Vec<f64>;

    /// [`ScaleRule::update`] by tensor operations: from a position (fp64) and whether there was an overflow (bool, no
    /// dimension) a new tensor with the next one. Counts patience, and does not act on it.
    ///
    /// # Errors
    /// Those of libtorch.
    fn moved(&self, position: &Tensor, overflow: &Tensor) -> Result<Tensor>;

    /// Goes where a position that was read says.
    ///
    /// # Errors
    /// Those of [`ScaleRule::update`]: too many steps were left out.
    fn adopt(&mut self, position: &[f64]) -> Result<()>;
}

/// A loss scaler that decides on the device. See the [module](self).
#[derive(Debug)]
pub struct DeviceScaler<R> {
    /// Where it stood when it was last read.
    rule: R,
    /// Fp64. Each update makes a new tensor, so that one that was handed out stays what it is.
    position: Tensor,
    ledger: Ledger,
}

impl<R: DeviceRule> Scaler<R> {
    /// The same scaler with its scale on `device`, and steps left out there. What was unscaled and has not stepped is
    /// forgotten.
    ///
    /// # Errors
    /// A device that is not there.
    pub fn on_device(self, device: Device) -> Result<DeviceScaler<R>> {
        DeviceScaler::new(self.rule, device)
    }
}

impl<R: DeviceRule> DeviceScaler<R> {
    /// A scaler whose scale lies on `device`, where the loss is.
    ///
    /// # Errors
    /// A device that is not there.
    pub fn new(rule: R, device: Device) -> Result<Self> {
        let position = Tensor::f_from_slice(&rule.position())?.f_to_device(device)?;
        Ok(Self { rule, position, ledger: Ledger::default() })
    }

    /// The loss times the scale; see [`Scaler::scale`].
    ///
    /// # Errors
    /// Those of libtorch.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        let scale = self.position.f_select(0, 0)?.f_to_kind(Kind::Float)?;
        Ok(loss.f_mul(&scale.f_to_device(loss.device())?)?)
    }

    /// Divides the gradients of one optimizer by the scale; see [`Scaler::unscale_`].
    ///
    /// # Errors
    /// As [`Scaler::unscale_`].
    pub fn unscale_(&mut self, optimizer: &str, grads: &[Tensor], norm: bool) -> Result<Unscaled> {
        let inverse = self.position.f_narrow(0, 0, 1)?.f_reciprocal()?.f_to_kind(Kind::Float)?;
        unscale_once(&mut self.ledger, optimizer, grads, &inverse, norm)
    }

    /// One step of an optimizer, which the device leaves out where its gradients overflowed. Unscales first where that was
    /// not done.
    ///
    /// # Errors
    /// An optimizer without a fused kernel ([`Optimizer::step_unless`]); [`Error::SteppedTwice`](crate::Error::SteppedTwice); those of
    /// [`DeviceScaler::unscale_`].
    pub fn step(&mut self, name: &str, optimizer: &mut Optimizer) -> Result<()> {
        if !self.ledger.is_unscaled(name) {
            let grads = optimizer.gradients()?;
            self.unscale_(name, &grads, false)?;
        }
        let found_inf = self.ledger.step_on_device(name)?;
        Ok(optimizer.step_unless(&found_inf).inspect_err(|_| self.ledger.take_back(name))?)
    }

    /// Moves the scale, once after all optimizers have stepped: by an overflow if any of them had one.
    ///
    /// # Errors
    /// [`Error::NothingStepped`](crate::Error::NothingStepped).
    pub fn update(&mut self) -> Result<()> {
        let flags = self.ledger.settle_on_device()?;
        self.advance(&flags)
    }

    /// Waits for the device, and says where the scale stands.
    ///
    /// # Errors
    /// [`Error::Exhausted`](crate::Error::Exhausted), [`Error::TooHigh`](crate::Error::TooHigh): too many steps in a row were left out.
    pub fn read(&mut self) -> Result<&R> {
        let position = runtime::ops::read(&self.position)?;
        self.rule.adopt(&position)?;
        Ok(&self.rule)
    }

    /// What a checkpoint keeps: the same as the scaler that decides on the host. Waits for the device.
    ///
    /// # Errors
    /// Those of the device.
    pub fn state(&self) -> Result<Value> {
        let mut rule = self.rule.clone();
        // That patience has run out is for `read` to say.
        let _ = rule.adopt(&runtime::ops::read(&self.position)?);
        Ok(named(R::NAME, &rule.state()))
    }

    /// Goes on from what [`DeviceScaler::state`] or [`Scaler::state`] gave.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) for that of another scaler.
    pub fn load_state(&mut self, state: &Value) -> Result<()> {
        self.rule.load_state(unnamed(R::NAME, state)?)?;
        self.position = Tensor::f_from_slice(&self.rule.position())?.f_to_device(self.position.device())?;
        self.ledger.clear();
        Ok(())
    }

    fn advance(&mut self, flags: &[Tensor]) -> Result<()> {
        let device = self.position.device();
        let mut overflow = Tensor::f_zeros([], (Kind::Bool, device))?;
        for flag in flags {
            // A flag that is NaN itself is no good sign either.
            overflow =
                overflow.f_logical_or(&flag.f_to_device(device)?.f_reshape([] as [i64; 0])?.f_ne(0)?)?;
        }
        self.position = self.rule.moved(&self.position, &overflow)?;
        Ok(())
    }
}

impl<R: DeviceRule> training::scaler::GradScaler for DeviceScaler<R> {
    fn scale(&self, loss: &Tensor) -> training::Result<Tensor> {
        DeviceScaler::scale(self, loss).map_err(to_training)
    }

    fn unscale_(&mut self, grads: &[Tensor], norm: bool) -> training::Result<Checked> {
        let Unscaled { found_inf, norm } =
            DeviceScaler::unscale_(self, LOOP, grads, norm).map_err(to_training)?;
        Ok(Checked { found_inf: Some(found_inf), norm: norm.map(Norm::known) })
    }

    fn update(&mut self, overflow: bool) -> training::Result<()> {
        let flag = Tensor::from(f32::from(u8::from(overflow)));
        DeviceSide::update(self, &flag)
    }

    fn current(&self) -> f64 {
        runtime::ops::read(&self.position)
            .ok()
            .and_then(|position| position.first().copied())
            .unwrap_or(f64::NAN)
    }

    /// Waits for the device. Where that fails, a state that no scaler takes.
    fn state(&self) -> Value {
        DeviceScaler::state(self).unwrap_or_else(|error| Value::String(error.to_string()))
    }

    fn load_state(&mut self, state: &Value) -> training::Result<()> {
        DeviceScaler::load_state(self, state).map_err(to_training)
    }

    fn device_side(&mut self) -> Option<&mut dyn DeviceSide> {
        Some(self)
    }
}

impl<R: DeviceRule> DeviceSide for DeviceScaler<R> {
    fn update(&mut self, found_inf: &Tensor) -> training::Result<()> {
        self.ledger.clear();
        self.advance(&[found_inf.shallow_clone()]).map_err(to_training)
    }

    fn position(&self) -> Tensor {
        self.position.shallow_clone()
    }

    fn learn(&mut self, position: &[f64]) -> training::Result<()> {
        self.rule.adopt(position).map_err(to_training)
    }
}
