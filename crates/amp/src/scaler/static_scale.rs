//! A constant scale.

use runtime::ops::TryScalar;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use training::scaler::GradScaler;

use super::ScaleRule;
use super::device_scaler::{DeviceRule, DeviceScaler};
use crate::error::{Error, Result, foreign_state, option};

/// Overflows in a row after which the run ends with an error.
const PATIENCE: u32 = 200;

/// The rule of [`StaticGradScaler`](super::StaticGradScaler): a step that overflows is skipped, and the scale stays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StaticRule {
    scale: f32,
    patience: u32,
    skipped: u32,
}

impl StaticRule {
    /// Creates a rule with a finite scale above 0.
    ///
    /// # Errors
    /// Any other scale.
    pub fn new(scale: f32) -> Result<Self> {
        if scale.is_finite() && scale > 0.0 {
            return Ok(Self { scale, patience: PATIENCE, skipped: 0 });
        }
        Err(option("scale", scale.into(), "a finite number above 0"))
    }

    /// Sets the number of overflows in a row after which the run ends with an error; 200 by default.
    #[must_use]
    pub fn with_patience(self, patience: u32) -> Self {
        Self { patience, ..self }
    }

    fn check_patience(&self) -> Result<()> {
        if self.skipped > self.patience {
            return Err(Error::Overflowed(format!(
                "gradient scaler: {} steps in a row had infinite or NaN gradients at the static scale {}; use a lower scale or the dynamic \
                 scaler",
                self.skipped, self.scale
            )));
        }
        Ok(())
    }
}

impl ScaleRule for StaticRule {
    const NAME: &'static str = "static scaler";

    fn scale(&self) -> f32 {
        self.scale
    }

    fn update(&mut self, overflow: bool) -> Result<()> {
        self.skipped = if overflow { self.skipped.saturating_add(1) } else { 0 };
        self.check_patience()
    }

    fn state(&self) -> Value {
        json!({ "scale": self.scale, "skipped": self.skipped })
    }

    fn load_state(&mut self, state: &Value) -> Result<()> {
        let refuse = |reason: &str| foreign_state(state, Self::NAME, reason);
        let scale = state["scale"].as_f64().ok_or_else(|| refuse("it has no `scale`"))?;
        if scale as f32 != self.scale {
            return Err(refuse(&format!("this run's scale is {}", self.scale)));
        }
        let skipped = state["skipped"].as_u64().and_then(|skipped| u32::try_from(skipped).ok());
        self.skipped = skipped.ok_or_else(|| refuse("it has no `skipped`"))?;
        Ok(())
    }

    fn scaler_on_device(&self, device: Device) -> Result<Option<Box<dyn GradScaler>>> {
        Ok(Some(Box::new(DeviceScaler::new(*self, device)?)))
    }
}

impl DeviceRule for StaticRule {
    /// Returns the scale and the steps skipped in a row.
    fn state_vector(&self) -> Vec<f64> {
        vec![self.scale.into(), self.skipped.into()]
    }

    fn update_on_device(&self, state: &Tensor, overflow: &Tensor) -> Result<Tensor> {
        // [s, n] + [0, 1] after an overflow, [s, n]·[1, 0] otherwise.
        let after_overflow = state.f_add(&Tensor::try_arange(2, (Kind::Double, state.device()))?)?;
        let after_step =
            state.f_mul(&Tensor::try_arange_start_step(1, -1, -1, (Kind::Double, state.device()))?)?;
        Ok(after_overflow.f_where_self(overflow, &after_step)?)
    }

    fn set_state_vector(&mut self, state: &[f64]) -> Result<()> {
        if let &[_, skipped] = state {
            self.skipped = skipped as u32;
        }
        self.check_patience()
    }
}
