//! A scale that stays what it is.

use serde_json::{Value, json};
use tch::{Kind, Tensor};

use super::ScaleRule;
use super::device_scaler::DeviceRule;
use crate::error::{Error, Result};

/// Steps in a row that may overflow before the run ends with an error.
const PATIENCE: u32 = 200;

/// One scale for the whole training. A step that overflows is left out, and the scale does not move.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StaticRule {
    scale: f32,
    patience: u32,
    skipped: u32,
}

impl StaticRule {
    /// A finite scale above 0.
    ///
    /// # Errors
    /// [`Error::Option`] for any other.
    pub fn new(scale: f32) -> Result<Self> {
        if scale.is_finite() && scale > 0.0 {
            return Ok(Self { scale, patience: PATIENCE, skipped: 0 });
        }
        Err(Error::Option { name: "scale", value: scale.into(), expected: "a finite number above 0" })
    }

    /// Ends with an error after so many steps in a row that overflowed, instead of 200.
    #[must_use]
    pub fn with_patience(self, patience: u32) -> Self {
        Self { patience, ..self }
    }

    fn check_patience(&self) -> Result<()> {
        if self.skipped > self.patience {
            return Err(Error::TooHigh { skipped: self.skipped, scale: self.scale });
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
        let refuse = |reason: &str| Error::State {
            found: state.to_string(),
            expected: Self::NAME,
            reason: reason.to_owned(),
        };
        let scale = state["scale"].as_f64().ok_or_else(|| refuse("it has no `scale`"))?;
        if scale as f32 != self.scale {
            return Err(refuse(&format!("this run's scale is {}", self.scale)));
        }
        let skipped = state["skipped"].as_u64().and_then(|skipped| u32::try_from(skipped).ok());
        self.skipped = skipped.ok_or_else(|| refuse("it has no `skipped`"))?;
        Ok(())
    }
}

impl DeviceRule for StaticRule {
    /// The scale and the steps left out in a row.
    fn position(&self) -> Vec<f64> {
        vec![self.scale.into(), self.skipped.into()]
    }

    fn moved(&self, position: &Tensor, overflow: &Tensor) -> Result<Tensor> {
        let more = position.f_add(&Tensor::f_arange(2, (Kind::Double, position.device()))?)?;
        let none =
            position.f_mul(&Tensor::f_arange_start_step(1, -1, -1, (Kind::Double, position.device()))?)?;
        Ok(more.f_where_self(overflow, &none)?)
    }

    fn adopt(&mut self, position: &[f64]) -> Result<()> {
        if let &[_, skipped] = position {
            self.skipped = skipped as u32;
        }
        self.check_patience()
    }
}
