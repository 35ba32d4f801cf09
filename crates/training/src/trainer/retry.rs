//! Recomputes gradients that overflowed, at a lower scale.
//!
//! Usually such a step is skipped, and its batch is lost: every time a dynamic scale has grown too far, and several times if it
//! started too high. [`Overflow::Retry`] lowers the scale and runs the same micro-batches again with the same random numbers.
//! The step equals, bit for bit, one with the right scale from the start. Each decrease costs one gradient computation.
//!
//! A batch whose gradients are infinite or NaN at any scale is skipped after the `most` attempts of [`Overflow::Retry`]. The
//! scaler then has the state that skipping the step immediately would have given, so bad data cannot push the scale to its
//! minimum.

use runtime::random::RandomState;
use serde_json::Value;

use super::Trainer;
use crate::error::{Error, Result};
use crate::optimizer::StepDecision;

/// The reaction to a step whose gradients overflowed under a scaler.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Overflow {
    /// Skips it.
    #[default]
    Skip,
    /// Recomputes its gradients while the scaler lowers its scale, then skips it. Not possible with a scaler that decides on
    /// the device ([`crate::scaler::DeviceGradScaler`]), because the host would have to wait.
    Retry {
        /// Attempts after the first.
        most: u32,
    },
}

/// The state that another attempt needs.
pub(super) struct Attempts {
    most: u32,
    made: u32,
    /// The scaler's state before the step.
    scaler: Value,
}

impl Attempts {
    pub(super) fn made(this: Option<&Self>) -> u32 {
        this.map_or(0, |attempts| attempts.made)
    }
}

impl Trainer {
    /// Saves what another attempt at the step needs, if there may be one.
    pub(super) fn attempts(&mut self) -> Result<Option<Attempts>> {
        let Overflow::Retry { most } = self.options.overflow else { return Ok(None) };
        if self.scaler.device_scaler().is_some() {
            let reason = "it decides on the device, where no step can be tried again; give one that decides on the host, or \
                          leave steps out (Overflow::Skip)";
            return Err(Error::config("gradient scaler", reason));
        }
        Ok(Some(Attempts { most, made: 0, scaler: self.scaler.state() }))
    }

    /// Returns whether the gradients are to be recomputed; `scale` is the scale that they had. If so, the state is restored
    /// except for the scale: `random` is that of the generators.
    pub(super) fn try_again(
        &mut self,
        attempts: Option<&mut Attempts>,
        decision: &StepDecision,
        scale: f64,
        random: &RandomState,
    ) -> Result<bool> {
        let (Some(attempts), StepDecision::Host { overflow: true, .. }) = (attempts, decision) else {
            return Ok(false);
        };
        if self.scaler.current() < scale && attempts.made < attempts.most {
            attempts.made += 1;
            self.optimizer.zero_grad(self.options.zero_grad)?;
            random.restore()?;
            return Ok(true);
        }
        if attempts.made > 0 {
            self.scaler.load_state(&attempts.scaler)?;
            self.scaler.update(true)?;
        }
        Ok(false)
    }
}
