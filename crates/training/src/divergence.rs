//! When to stop because the training has left the region where it makes sense.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A loss is bad when it is not finite, or more than `above` nats over the least one so far; several bad ones in a row are
/// a divergence. (A distance, not a ratio: a model that has learned its data to a loss near 0 is not diverging when a batch
/// has ten times that.)
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Divergence {
    /// Nats over the minimum.
    pub above: f64,
    /// Bad losses in a row that end the training; 0 for never.
    pub patience: u32,
}

impl Default for Divergence {
    fn default() -> Self {
        Self { above: 3.0, patience: 20 }
    }
}

/// What has been seen so far.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Watch {
    minimum: Option<f64>,
    bad: u32,
}

impl Watch {
    /// Bad losses in a row, up to the last one seen.
    pub fn bad(&self) -> u32 {
        self.bad
    }

    /// Looks at the loss of a step.
    ///
    /// # Errors
    /// [`Error::Diverged`] where it is the last of too many.
    pub fn see(&mut self, step: u64, loss: f64, rule: Divergence) -> Result<()> {
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
            _ => format!("the loss is {loss}, and has been out of bounds for {} steps", self.bad),
        };
        Err(Error::Diverged { step, reason })
    }
}
