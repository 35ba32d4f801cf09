//! Detection of diverging losses.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A loss is bad if it is not finite, or more than `above` nats over the minimum so far; several bad ones in a row are a
/// divergence. (A difference, not a ratio: near a loss of 0, a batch with ten times the loss is no divergence.)
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Divergence {
    /// Nats above the minimum.
    pub above: f64,
    /// Bad losses in a row that end the training; 0 for never.
    pub patience: u32,
}

impl Default for Divergence {
    fn default() -> Self {
        Self { above: 3.0, patience: 20 }
    }
}

/// Tracks the losses of a training.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DivergenceMonitor {
    minimum: Option<f64>,
    bad: u32,
}

impl DivergenceMonitor {
    /// Returns the number of bad losses in a row, up to the last one.
    pub fn bad(&self) -> u32 {
        self.bad
    }

    /// Records the loss of a step.
    ///
    /// # Errors
    /// [`Error::Diverged`] after too many bad losses in a row.
    pub fn observe(&mut self, step: u64, loss: f64, rule: Divergence) -> Result<()> {
        let minimum =
            self.minimum.unwrap_or(f64::INFINITY).min(if loss.is_nan() { f64::INFINITY } else { loss });
        if loss.is_finite() && loss <= minimum + rule.above {
            (self.minimum, self.bad) = (Some(minimum), 0);
            return Ok(());
        }
        self.bad = self.bad.saturating_add(1);
        if rule.patience == 0 || self.bad < rule.patience {
            return Ok(());
        }
        let reason = match self.minimum {
            Some(minimum) if loss.is_finite() => format!(
                "the loss is {loss:.4}, more than {} above its minimum of {minimum:.4}, for {} steps",
                rule.above, self.bad
            ),
            _ => format!("the loss is {loss}, and it has been out of bounds for {} steps", self.bad),
        };
        Err(Error::Diverged { step, reason })
    }
}
