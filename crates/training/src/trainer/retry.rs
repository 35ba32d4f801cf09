//! Gradients that overflowed, computed once more at a lower scale.
//!
//! The usual way leaves such a step out, and with it what its batch would have taught: every time that a dynamic scale has
//! grown too far, and several times over when it began too high. [`Overflow::Retry`] lets the scale fall and runs the same
//! micro-batches again, with the same random numbers: the step comes out, bit for bit, as if the scale had been right at
//! once. It costs one gradient for each fall.
//!
//! A batch whose gradients are infinite or NaN at any scale is left out after [`Overflow::Retry`]'s `most` attempts, and the
//! scaler then stands where leaving it out at once would have put it: bad data cannot drive the scale to its least.

use runtime::random::RandomState;
use serde_json::Value;
use tch::Device;

use super::Trainer;
use crate::error::{Error, Result};
use crate::optimizer::StepDecision;

/// What to do with a step whose gradients overflowed under a scaler.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Overflow {
    /// Leave it out.
    #[default]
    Skip,
    /// Compute its gradients again while the scaler lowers its scale, then leave it out. A scaler that decides on the device
    /// ([`crate::scaler::DeviceSide`]) cannot: the host would have to wait for it.
    Retry {
        /// Attempts after the first.
        most: u32,
    },
}

/// What a further attempt needs.
pub(super) struct Attempts {
    most: u32,
    made: u32,
    /// The scaler before the step.
    scaler: Value,
    /// The random generators before the step.
    random: RandomState,
}

impl Attempts {
    pub(super) fn made(this: Option<&Self>) -> u32 {
        this.map_or(0, |attempts| attempts.made)
    }
}

impl Trainer {
    /// What a second attempt at the step will need, if there may be one.
    pub(super) fn attempts(&mut self, device: Device) -> Result<Option<Attempts>> {
        let Overflow::Retry { most } = self.options.overflow else { return Ok(None) };
        if self.scaler.device_side().is_some() {
            let reason = "it decides on the device, where no step can be tried again; give one that decides on the host, or \
                          leave steps out (Overflow::Skip)";
            return Err(Error::config("gradient scaler", reason));
        }
        let random = RandomState::capture(device)?;
        Ok(Some(Attempts { most, made: 0, scaler: self.scaler.state(), random }))
    }

    /// Whether the gradients are to be computed again; `scale` is what they had. If so, everything is as before the step
    /// but for the scale.
    pub(super) fn try_again(
        &mut self,
        attempts: Option<&mut Attempts>,
        decision: &StepDecision,
        scale: f64,
    ) -> Result<bool> {
        let (Some(attempts), StepDecision::Host { overflow: true, .. }) = (attempts, decision) else {
            return Ok(false);
        };
        if self.scaler.current() < scale && attempts.made < attempts.most {
            attempts.made += 1;
            self.optimizer.zero_grad(self.options.zero_grad)?;
            attempts.random.restore()?;
            return Ok(true);
        }
        if attempts.made > 0 {
            self.scaler.load_state(&attempts.scaler)?;
            self.scaler.update(true)?;
        }
        Ok(false)
    }
}
