//! The update of a dynamic scale: pure arithmetic on the host.
//!
//! With s the scale, t the growth tracker (steps without overflow since the scale last changed), and h the hysteresis tracker
//! (overflows until the scale falls):
//!
//! - after a step with an infinite or NaN gradient: t ← 0, h ← h − 1, and if h ≤ 0, s ← max(s·backoff_factor, min_scale);
//! - after any other step: t ← t + 1; at t = growth_interval, t ← 0, h ← hysteresis, and s ← min(s·growth_factor, max_scale)
//!   if that is finite.
//!
//! Products are rounded to fp32 once, from fp64, as in PyTorch's `_amp_update_scale_`. With a hysteresis of 1, the default,
//! the two agree to the bit, except that PyTorch has no `min_scale`. Hysteresis is Megatron-LM's: the scale falls only after
//! that many overflows since it last grew, so that one bad batch does not cost a whole interval.

use kernels::loss_scale::{self, Dynamic, Updated};
use runtime::ops::TryScalar;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use training::scaler::GradScaler;

use super::ScaleRule;
use super::device_scaler::{DeviceRule, DeviceScaler};
use crate::error::{Error, Result, foreign_state, option};

/// Options of a dynamic scale, under the names of `torch.amp.GradScaler` and Megatron-LM.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DynamicScalerConfig {
    /// Initial scale.
    #[serde(alias = "initial")]
    pub init_scale: f32,
    /// Factor applied after `growth_interval` steps without overflow; above 1.
    #[serde(alias = "growth")]
    pub growth_factor: f64,
    /// Factor applied after an overflow; between 0 and 1.
    #[serde(alias = "backoff")]
    pub backoff_factor: f64,
    /// Steps without overflow until the scale grows.
    #[serde(alias = "interval")]
    pub growth_interval: u32,
    /// Lower bound of the scale.
    #[serde(alias = "least")]
    pub min_scale: f32,
    /// Upper bound of the scale.
    #[serde(alias = "most")]
    pub max_scale: f32,
    /// Overflows since the last growth until the scale falls; with 1 it falls at each overflow.
    pub hysteresis: u32,
}

impl Default for DynamicScalerConfig {
    /// PyTorch's defaults; the bounds are the smallest and the largest normal fp32 numbers.
    fn default() -> Self {
        Self {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            min_scale: f32::MIN_POSITIVE,
            max_scale: f32::MAX,
            hysteresis: 1,
        }
    }
}

impl DynamicScalerConfig {
    /// Checks that every option is within its range.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |name, value: f64, expected| Err(option(name, value, expected));
        let positive = |value: f32| value.is_finite() && value > 0.0;
        match *self {
            Self { init_scale, .. } if !positive(init_scale) => {
                refuse("init_scale", init_scale.into(), "a finite number above 0")
            }
            Self { growth_factor, .. } if !(growth_factor > 1.0 && growth_factor.is_finite()) => {
                refuse("growth_factor", growth_factor, "a finite number above 1")
            }
            Self { backoff_factor, .. } if !(backoff_factor > 0.0 && backoff_factor < 1.0) => {
                refuse("backoff_factor", backoff_factor, "a number between 0 and 1")
            }
            Self { growth_interval: 0, .. } => refuse("growth_interval", 0.0, "at least 1 step"),
            Self { hysteresis: 0, .. } => refuse("hysteresis", 0.0, "at least 1 overflow"),
            Self { min_scale, .. } if !positive(min_scale) => {
                refuse("min_scale", min_scale.into(), "a finite number above 0")
            }
            Self { min_scale, max_scale, .. } if !(positive(max_scale) && min_scale <= max_scale) => {
                refuse("max_scale", max_scale.into(), "a finite number not below `min_scale`")
            }
            Self { init_scale, min_scale, max_scale, .. }
                if !(min_scale..=max_scale).contains(&init_scale) =>
            {
                refuse("init_scale", init_scale.into(), "a number from `min_scale` to `max_scale`")
            }
            _ => Ok(()),
        }
    }
}

/// The state of a dynamic scale.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DynamicScale {
    /// s.
    pub scale: f32,
    /// t: steps without overflow since the scale last changed.
    #[serde(alias = "tracker")]
    pub growth_tracker: u32,
    /// h: overflows until the scale falls.
    #[serde(alias = "bears")]
    pub hysteresis_tracker: u32,
}

impl DynamicScale {
    /// Returns the initial state.
    pub fn new(options: &DynamicScalerConfig) -> Self {
        Self { scale: options.init_scale, growth_tracker: 0, hysteresis_tracker: options.hysteresis }
    }

    /// Updates the scale after a step.
    pub fn update(&mut self, overflow: bool, options: &DynamicScalerConfig) {
        if overflow {
            self.growth_tracker = 0;
            self.hysteresis_tracker = self.hysteresis_tracker.saturating_sub(1);
            if self.hysteresis_tracker == 0 {
                self.scale = times(self.scale, options.backoff_factor).max(options.min_scale);
            }
            return;
        }
        self.growth_tracker += 1;
        if self.growth_tracker >= options.growth_interval {
            self.growth_tracker = 0;
            self.hysteresis_tracker = options.hysteresis;
            let grown = times(self.scale, options.growth_factor);
            if grown.is_finite() {
                self.scale = grown.min(options.max_scale);
            }
        }
    }
}

fn times(scale: f32, factor: f64) -> f32 {
    (f64::from(scale) * factor) as f32
}

/// Overflows in a row at the minimum scale after which the run ends with an error.
const PATIENCE: u32 = 50;

/// The rule of [`DynamicGradScaler`](super::DynamicGradScaler): options and state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DynamicRule {
    options: DynamicScalerConfig,
    current: DynamicScale,
    /// Steps skipped in a row.
    skipped: u32,
    /// Overflows at the minimum scale.
    at_min_scale: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    options: DynamicScalerConfig,
    #[serde(alias = "now")]
    current: DynamicScale,
    skipped: u32,
    #[serde(alias = "at_least")]
    at_min_scale: u32,
}

impl DynamicRule {
    /// Creates a rule in its initial state.
    ///
    /// # Errors
    /// An option outside its range.
    pub fn new(options: DynamicScalerConfig) -> Result<Self> {
        options.check()?;
        Ok(Self { options, current: DynamicScale::new(&options), skipped: 0, at_min_scale: 0 })
    }

    /// Returns the current state.
    pub fn current(&self) -> DynamicScale {
        self.current
    }

    /// Returns the options.
    pub fn options(&self) -> &DynamicScalerConfig {
        &self.options
    }

    fn check_patience(&self) -> Result<()> {
        if self.at_min_scale > PATIENCE {
            return Err(Error::Overflowed(format!(
                "gradient scaler: {} steps in a row had infinite or NaN gradients, the last ones at the minimum scale, {:e}; no scale \
                 helps, so check the data and the parameters for NaN and lower the learning rate",
                self.skipped, self.current.scale
            )));
        }
        Ok(())
    }
}

impl ScaleRule for DynamicRule {
    const NAME: &'static str = "dynamic scaler";

    fn scale(&self) -> f32 {
        self.current.scale
    }

    fn update(&mut self, overflow: bool) -> Result<()> {
        let at_min_scale = self.current.scale <= self.options.min_scale;
        self.current.update(overflow, &self.options);
        if !overflow {
            (self.skipped, self.at_min_scale) = (0, 0);
            return Ok(());
        }
        self.skipped = self.skipped.saturating_add(1);
        self.at_min_scale = self.at_min_scale.saturating_add(u32::from(at_min_scale));
        self.check_patience()
    }

    fn state(&self) -> Value {
        let &Self { options, current, skipped, at_min_scale } = self;
        json!(State { options, current, skipped, at_min_scale })
    }

    /// Restores a state with its options: a scale belongs to the options that produced it.
    fn load_state(&mut self, state: &Value) -> Result<()> {
        let refuse = |reason: String| foreign_state(state, Self::NAME, reason);
        let State { options, current, skipped, at_min_scale } =
            State::deserialize(state).map_err(|cause| refuse(cause.to_string()))?;
        options.check()?;
        if !(current.scale.is_finite() && current.scale > 0.0)
            || current.growth_tracker >= options.growth_interval
        {
            return Err(refuse("its scale or its growth tracker is out of range".into()));
        }
        *self = Self { options, current, skipped, at_min_scale };
        Ok(())
    }

    fn scaler_on_device(&self, device: Device) -> Result<Option<Box<dyn GradScaler>>> {
        Ok(Some(Box::new(DeviceScaler::new(*self, device)?)))
    }
}

impl DeviceRule for DynamicRule {
    /// Returns s, t, h, the steps skipped in a row, and those of them at the minimum scale.
    fn state_vector(&self) -> Vec<f64> {
        let DynamicScale { scale, growth_tracker, hysteresis_tracker } = self.current;
        vec![
            scale.into(),
            growth_tracker.into(),
            hysteresis_tracker.into(),
            self.skipped.into(),
            self.at_min_scale.into(),
        ]
    }

    /// [`DynamicScale::update`] without a branch: computes both outcomes and selects one by the flag.
    fn update_on_device(&self, state: &Tensor, overflow: &Tensor) -> Result<Tensor> {
        let DynamicScalerConfig {
            growth_factor,
            backoff_factor,
            growth_interval,
            min_scale,
            max_scale,
            hysteresis,
            ..
        } = self.options;
        let part = |index: i64| state.f_select(0, index);
        let (scale, growth_tracker, hysteresis_tracker) = (part(0)?, part(1)?, part(2)?);
        // Rounded to fp32 once, from fp64.
        let times =
            |factor: f64| scale.try_mul_scalar(factor)?.f_to_kind(Kind::Float)?.f_to_kind(Kind::Double);
        let zero = scale.f_zeros_like()?;

        let hysteresis_left = hysteresis_tracker.try_sub_scalar(1)?.try_clamp_min(0)?;
        let fallen = times(backoff_factor)?
            .try_clamp_min(f64::from(min_scale))?
            .f_where_self(&hysteresis_left.try_eq(0)?, &scale)?;
        let at_min_scale = part(4)?.f_add(&scale.try_le(f64::from(min_scale))?.f_to_kind(Kind::Double)?)?;
        let after_overflow =
            [fallen, zero.shallow_clone(), hysteresis_left, part(3)?.try_add_scalar(1)?, at_min_scale];

        let growth_tracker = growth_tracker.try_add_scalar(1)?;
        let due = growth_tracker.try_ge(f64::from(growth_interval))?;
        let grown = times(growth_factor)?;
        let grows = due.f_logical_and(&grown.f_isfinite()?)?;
        let grown = grown.try_clamp_max(f64::from(max_scale))?.f_where_self(&grows, &scale)?;
        let hysteresis_tracker = hysteresis_tracker
            .try_full_like(f64::from(hysteresis))?
            .f_where_self(&due, &hysteresis_tracker)?;
        let after_step = [
            grown,
            zero.f_where_self(&due, &growth_tracker)?,
            hysteresis_tracker,
            zero.shallow_clone(),
            zero,
        ];

        Ok(Tensor::f_stack(&after_overflow, 0)?.f_where_self(overflow, &Tensor::f_stack(&after_step, 0)?)?)
    }

    fn update_by_kernel(&self, state: &Tensor, found_inf: &Tensor) -> Result<Option<Updated>> {
        let DynamicScalerConfig {
            growth_factor,
            backoff_factor,
            growth_interval,
            min_scale,
            max_scale,
            hysteresis,
            ..
        } = self.options;
        let options =
            Dynamic { growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis };
        Ok(loss_scale::update(state, found_inf, &options)?)
    }

    fn set_state_vector(&mut self, state: &[f64]) -> Result<()> {
        if let &[scale, growth_tracker, hysteresis_tracker, skipped, at_min_scale] = state {
            self.current = DynamicScale {
                scale: scale as f32,
                growth_tracker: growth_tracker as u32,
                hysteresis_tracker: hysteresis_tracker as u32,
            };
            (self.skipped, self.at_min_scale) = (skipped as u32, at_min_scale as u32);
        }
        self.check_patience()
    }
}
