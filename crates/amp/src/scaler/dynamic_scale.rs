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

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use super::ScaleRule;
use super::device_scaler::DeviceRule;
use crate::error::{Error, Result};

/// Options of a dynamic scale, under the names of `torch.amp.GradScaler` and Megatron-LM.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DynamicOptions {
    /// Initial scale.
    pub initial: f32,
    /// Factor applied after `interval` steps without overflow; above 1.
    pub growth: f64,
    /// Factor applied after an overflow; between 0 and 1.
    pub backoff: f64,
    /// Steps without overflow until the scale grows.
    pub interval: u32,
    /// Lower bound of the scale.
    pub least: f32,
    /// Upper bound of the scale.
    pub most: f32,
    /// Overflows since the last growth until the scale falls; with 1 it falls at each overflow.
    pub hysteresis: u32,
}

impl Default for DynamicOptions {
    /// PyTorch's defaults; the bounds are the smallest and the largest normal fp32 numbers.
    fn default() -> Self {
        Self {
            initial: 65536.0,
            growth: 2.0,
            backoff: 0.5,
            interval: 2000,
            least: f32::MIN_POSITIVE,
            most: f32::MAX,
            hysteresis: 1,
        }
    }
}

impl DynamicOptions {
    /// Checks that every option is within its range.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |name, value: f64, expected| Err(Error::Option { name, value, expected });
        let positive = |value: f32| value.is_finite() && value > 0.0;
        match *self {
            Self { initial, .. } if !positive(initial) => {
                refuse("initial", initial.into(), "a finite number above 0")
            }
            Self { growth, .. } if !(growth > 1.0 && growth.is_finite()) => {
                refuse("growth", growth, "a finite number above 1")
            }
            Self { backoff, .. } if !(backoff > 0.0 && backoff < 1.0) => {
                refuse("backoff", backoff, "a number between 0 and 1")
            }
            Self { interval: 0, .. } => refuse("interval", 0.0, "at least 1 step"),
            Self { hysteresis: 0, .. } => refuse("hysteresis", 0.0, "at least 1 overflow"),
            Self { least, .. } if !positive(least) => {
                refuse("least", least.into(), "a finite number above 0")
            }
            Self { least, most, .. } if !(positive(most) && least <= most) => {
                refuse("most", most.into(), "a finite number not below `least`")
            }
            Self { initial, least, most, .. } if !(least..=most).contains(&initial) => {
                refuse("initial", initial.into(), "a number from `least` to `most`")
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
    pub tracker: u32,
    /// h: overflows until the scale falls.
    pub bears: u32,
}

impl DynamicScale {
    /// Returns the initial state.
    pub fn new(options: &DynamicOptions) -> Self {
        Self { scale: options.initial, tracker: 0, bears: options.hysteresis }
    }

    /// Updates the scale after a step.
    pub fn update(&mut self, overflow: bool, options: &DynamicOptions) {
        if overflow {
            self.tracker = 0;
            self.bears = self.bears.saturating_sub(1);
            if self.bears == 0 {
                self.scale = times(self.scale, options.backoff).max(options.least);
            }
            return;
        }
        self.tracker += 1;
        if self.tracker >= options.interval {
            self.tracker = 0;
            self.bears = options.hysteresis;
            let grown = times(self.scale, options.growth);
            if grown.is_finite() {
                self.scale = grown.min(options.most);
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
    options: DynamicOptions,
    now: DynamicScale,
    /// Steps skipped in a row.
    skipped: u32,
    /// Those of them at the minimum scale.
    at_least: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    options: DynamicOptions,
    now: DynamicScale,
    skipped: u32,
    at_least: u32,
}

impl DynamicRule {
    /// Creates a rule in its initial state.
    ///
    /// # Errors
    /// [`Error::Option`] for an option outside its range.
    pub fn new(options: DynamicOptions) -> Result<Self> {
        options.check()?;
        Ok(Self { options, now: DynamicScale::new(&options), skipped: 0, at_least: 0 })
    }

    /// Returns the current state.
    pub fn now(&self) -> DynamicScale {
        self.now
    }

    /// Returns the options.
    pub fn options(&self) -> &DynamicOptions {
        &self.options
    }

    fn check_patience(&self) -> Result<()> {
        if self.at_least > PATIENCE {
            return Err(Error::Exhausted { skipped: self.skipped, scale: self.now.scale });
        }
        Ok(())
    }
}

impl ScaleRule for DynamicRule {
    const NAME: &'static str = "dynamic scaler";

    fn scale(&self) -> f32 {
        self.now.scale
    }

    fn update(&mut self, overflow: bool) -> Result<()> {
        let at_least = self.now.scale <= self.options.least;
        self.now.update(overflow, &self.options);
        if !overflow {
            (self.skipped, self.at_least) = (0, 0);
            return Ok(());
        }
        self.skipped = self.skipped.saturating_add(1);
        self.at_least = self.at_least.saturating_add(u32::from(at_least));
        self.check_patience()
    }

    fn state(&self) -> Value {
        let &Self { options, now, skipped, at_least } = self;
        json!(State { options, now, skipped, at_least })
    }

    /// Restores a state with its options: a scale belongs to the options that produced it.
    fn load_state(&mut self, state: &Value) -> Result<()> {
        let refuse = |reason: String| Error::State { found: state.to_string(), expected: Self::NAME, reason };
        let State { options, now, skipped, at_least } =
            State::deserialize(state).map_err(|cause| refuse(cause.to_string()))?;
        options.check()?;
        if !(now.scale.is_finite() && now.scale > 0.0) || now.tracker >= options.interval {
            return Err(refuse("its scale or its growth tracker is out of range".into()));
        }
        *self = Self { options, now, skipped, at_least };
        Ok(())
    }
}

impl DeviceRule for DynamicRule {
    /// Returns s, t, h, the steps skipped in a row, and those of them at the minimum scale.
    fn position(&self) -> Vec<f64> {
        let DynamicScale { scale, tracker, bears } = self.now;
        vec![scale.into(), tracker.into(), bears.into(), self.skipped.into(), self.at_least.into()]
    }

    /// [`DynamicScale::update`] without a branch: computes both outcomes and selects one by the flag.
    fn moved(&self, position: &Tensor, overflow: &Tensor) -> Result<Tensor> {
        let DynamicOptions { growth, backoff, interval, least, most, hysteresis, .. } = self.options;
        let part = |index: i64| position.f_select(0, index);
        let (scale, tracker, bears) = (part(0)?, part(1)?, part(2)?);
        // Rounded to fp32 once, from fp64.
        let times = |factor: f64| scale.f_mul_scalar(factor)?.f_to_kind(Kind::Float)?.f_to_kind(Kind::Double);
        let zero = scale.f_zeros_like()?;

        let left = bears.f_sub_scalar(1)?.f_clamp_min(0)?;
        let fallen = times(backoff)?.f_clamp_min(f64::from(least))?.f_where_self(&left.f_eq(0)?, &scale)?;
        let at_least = part(4)?.f_add(&scale.f_le(f64::from(least))?.f_to_kind(Kind::Double)?)?;
        let after_overflow = [fallen, zero.shallow_clone(), left, part(3)?.f_add_scalar(1)?, at_least];

        let tracker = tracker.f_add_scalar(1)?;
        let due = tracker.f_ge(f64::from(interval))?;
        let grown = times(growth)?;
        let grows = due.f_logical_and(&grown.f_isfinite()?)?;
        let grown = grown.f_clamp_max(f64::from(most))?.f_where_self(&grows, &scale)?;
        let bears = bears.f_full_like(f64::from(hysteresis))?.f_where_self(&due, &bears)?;
        let after_step = [grown, zero.f_where_self(&due, &tracker)?, bears, zero.shallow_clone(), zero];

        Ok(Tensor::f_stack(&after_overflow, 0)?.f_where_self(overflow, &Tensor::f_stack(&after_step, 0)?)?)
    }

    fn adopt(&mut self, position: &[f64]) -> Result<()> {
        if let &[scale, tracker, bears, skipped, at_least] = position {
            self.now = DynamicScale { scale: scale as f32, tracker: tracker as u32, bears: bears as u32 };
            (self.skipped, self.at_least) = (skipped as u32, at_least as u32);
        }
        self.check_patience()
    }
}
