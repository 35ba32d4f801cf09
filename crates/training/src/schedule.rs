//! Learning-rate schedules: pure functions of the step.
//!
//! With w warm-up steps, n steps in total, floor f, and p = (step − w) / (n − w) clamped to [0, 1], the factor is
//!
//! - (step + 1) / (w + 1) while step < w, so that the first step has a positive rate and the first after warm-up has 1;
//! - constant: 1;
//! - linear: f + (1 − f)·(1 − p);
//! - cosine: f + (1 − f)·(1 + cos πp) / 2 (Loshchilov & Hutter, arXiv:1608.03983).
//!
//! ```
//! use training::schedule::{LrSchedule, Shape};
//!
//! let schedule = LrSchedule { shape: Shape::Cosine, warmup: 10, steps: 110, floor: 0.1 };
//! assert_eq!(schedule.factor(10), 1.0);
//! assert!((schedule.factor(60) - 0.55).abs() < 1e-12);
//! assert_eq!(schedule.factor(110), 0.1);
//! ```

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// How the factor decays after warm-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// No decay.
    #[default]
    Constant,
    /// Linear decay.
    Linear,
    /// Cosine decay.
    Cosine,
}

/// A learning-rate schedule: the factor of the learning rate at each step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LrSchedule {
    /// The decay.
    pub shape: Shape,
    /// Warm-up steps.
    #[serde(default)]
    pub warmup: u64,
    /// The step, warm-up included, from which on the factor is the floor. Ignored by a constant schedule.
    #[serde(default)]
    pub steps: u64,
    /// The final factor, in [0, 1].
    #[serde(default)]
    pub floor: f64,
}

impl LrSchedule {
    /// # Errors
    /// A floor outside [0, 1]; a decay without a step after warm-up.
    pub fn check(&self) -> Result<()> {
        if !(0.0..=1.0).contains(&self.floor) {
            let reason = format!("the floor is {}; expected a number in [0, 1]", self.floor);
            return Err(Error::config("schedule", reason));
        }
        if self.shape != Shape::Constant && self.steps <= self.warmup {
            let reason = format!(
                "{} steps with a warm-up of {}; expected more steps than warm-up, or a constant shape",
                self.steps, self.warmup
            );
            return Err(Error::config("schedule", reason));
        }
        Ok(())
    }

    /// Returns the factor of step `step`, counted from 0: in [0, 1] for a schedule that passes [`LrSchedule::check`].
    pub fn factor(&self, step: u64) -> f64 {
        if step < self.warmup {
            return (step + 1) as f64 / (self.warmup + 1) as f64;
        }
        let (done, all) = (step - self.warmup, self.steps.saturating_sub(self.warmup));
        // Exactly the floor, without rounding.
        let left = match self.shape {
            Shape::Constant => return 1.0,
            _ if done >= all => return self.floor,
            Shape::Linear => (all - done) as f64 / all as f64,
            Shape::Cosine => (1.0 + (std::f64::consts::PI * done as f64 / all as f64).cos()) / 2.0,
        };
        self.floor + (1.0 - self.floor) * left
    }
}

/// Describes the schedule without settings that have no effect: a constant schedule has no end.
impl std::fmt::Display for LrSchedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let &Self { shape, warmup, steps, floor } = self;
        match shape {
            Shape::Constant => write!(f, "constant")?,
            Shape::Linear => write!(f, "linear to {floor} at step {steps}")?,
            Shape::Cosine => write!(f, "cosine to {floor} at step {steps}")?,
        }
        if warmup > 0 { write!(f, " after {warmup} steps of warm-up") } else { Ok(()) }
    }
}
