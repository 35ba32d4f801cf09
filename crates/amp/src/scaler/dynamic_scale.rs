//! How a dynamic scale moves: the arithmetic alone, on the host.
//!
//! With s the scale, t the number of good steps since it last moved, and h the overflows that it still bears:
//!
//! - a step with an infinity or a NaN among its gradients: t ← 0, h ← h − 1, and where h ≤ 0, s ← max(s·backoff, least);
//! - any other step: t ← t + 1, and at t = interval, t ← 0, h ← hysteresis, and s ← min(s·growth, most) if that is finite.
//!
//! Products are rounded to fp32 once, from fp64, as PyTorch's `_amp_update_scale_` does; with a hysteresis of 1, which is
//! the default, the two agree to the bit (but for PyTorch having no `least`). Hysteresis is Megatron-LM's: a scale that
//! has just grown bears that many overflows before it falls, so that one bad batch does not cost a whole interval.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use super::ScaleRule;
use super::device_scaler::DeviceRule;
use crate::error::{Error, Result};

/// The constants of a dynamic scale.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DynamicOptions {
    /// The first scale.
    pub initial: f32,
    /// What the scale is multiplied by after `interval` good steps; above 1.
    pub growth: f64,
    /// What it is multiplied by after an overflow; between 0 and 1.
    pub backoff: f64,
    /// Good steps until it grows.
    pub interval: u32,
    /// It never falls below.
    pub least: f32,
    /// It never grows beyond.
    pub most: f32,
    /// Overflows since it last grew that it takes until it falls; 1: it falls at each.
    pub hysteresis: u32,
}

impl Default for DynamicOptions {
    /// PyTorch's constants; the least and the most are those of normal fp32 numbers.
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
    /// Refuses what no scale can move by.
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

/// Where a dynamic scale stands.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DynamicScale {
    /// s.
    pub scale: f32,
    /// t: good steps since the scale last moved.
    pub tracker: u32,
    /// h: overflows until it falls.
    pub bears: u32,
}

impl DynamicScale {
    /// The beginning.
    pub fn new(options: &DynamicOptions) -> Self {
        Self { scale: options.initial, tracker: 0, bears: options.hysteresis }
    }

    /// Moves on by a step.
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

/// Steps in a row at the least scale that may overflow before the run ends with an error.
const PATIENCE: u32 = 50;

/// The rule of [`DynamicGradScaler`](super::DynamicGradScaler): its constants and where it stands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DynamicRule {
    options: DynamicOptions,
    now: DynamicScale,
    /// Steps left out in a row.
    skipped: u32,
    /// Those of them at the least scale.
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
    /// At the beginning.
    ///
    /// # Errors
    /// [`Error::Option`].
    pub fn new(options: DynamicOptions) -> Result<Self> {
        options.check()?;
        Ok(Self { options, now: DynamicScale::new(&options), skipped: 0, at_least: 0 })
    }

    /// Where it stands.
    pub fn now(&self) -> DynamicScale {
        self.now
    }

    /// Its constants.
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

    /// Goes on with the constants of the state: a scale belongs to the constants that it moved by.
    fn load_state(&mut self, state: &Value) -> Result<()> {
        let refuse = |reason: String| Error::State { found: state.to_string(), expected: Self::NAME, reason };
        let State { options, now, skipped, at_least } =
            State::deserialize(state).map_err(|cause| refuse(cause.to_string()))?;
        options.check()?;
        if !(now.scale.is_finite() && now.scale > 0.0) || now.tracker >= options.interval {
            return Err(refuse("its scale or its tracker is out of range".into()));
        }
        *self = Self { options, now, skipped, at_least };
        Ok(())
    }
}

impl DeviceRule for DynamicRule {
    /// s, t, h, the steps left out in a row, and those of them at the least scale.
    fn position(&self) -> Vec<f64> {
        let DynamicScale { scale, tracker, bears } = self.now;
        vec![scale.into(), tracker.into(), bears.into(), self.skipped.into(), self.at_least.into()]
    }

    /// [`DynamicScale::update`] without a branch: what either case would give, and of the two the one that is.
    fn moved(&self, position: &Tensor, overflow: &Tensor) -> Result<Tensor> {
        let DynamicOptions { growth, backoff, interval, least, most, hysteresis, .. } = self.options;
        let part = |index: i64| position.f_select(0, index);
        let (scale, tracker, bears) = (part(0)?, part(1)?, part(2)?);
        // Rounded to fp32 once, from fp64.
        let times = |factor: f64| scale.f_mul_scalar(factor)?.f_to_kind(Kind::Float)?.f_to_kind(Kind::Double);
        let zero = scale.f_zeros_like()?;

        let borne = bears.f_sub_scalar(1)?.f_clamp_min(0)?;
        let fallen = times(backoff)?.f_clamp_min(f64::from(least))?.f_where_self(&borne.f_eq(0)?, &scale)?;
        let at_least = part(4)?.f_add(&scale.f_le(f64::from(least))?.f_to_kind(Kind::Double)?)?;
        let bad = [fallen, zero.shallow_clone(), borne, part(3)?.f_add_scalar(1)?, at_least];

        let tracker = tracker.f_add_scalar(1)?;
        let due = tracker.f_ge(f64::from(interval))?;
        let grown = times(growth)?;
        let grows = due.f_logical_and(&grown.f_isfinite()?)?;
        let grown = grown.f_clamp_max(f64::from(most))?.f_where_self(&grows, &scale)?;
        let bears = bears.f_full_like(f64::from(hysteresis))?.f_where_self(&due, &bears)?;
        let good = [grown, zero.f_where_self(&due, &tracker)?, bears, zero.shallow_clone(), zero];

        Ok(Tensor::f_stack(&bad, 0)?.f_where_self(overflow, &Tensor::f_stack(&good, 0)?)?)
    }

    fn adopt(&mut self, position: &[f64]) -> Result<()> {
        if let &[scale, tracker, bears, skipped, at_least] = position {
            self.now = DynamicScale { scale: scale as f32, tracker: tracker as u32, bears: bears as u32 };
            (self.skipped, self.at_least) = (skipped as u32, at_least as u32);
        }
        self.check_patience()
    }
}
