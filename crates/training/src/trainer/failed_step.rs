//! A step that fails leaves the training as it was before it, or says that it could not.
//!
//! Until the optimizer updates weights, a step changes nothing that cannot be put back: its gradients are dropped, the random generators
//! and the data's position are set back, and the next call of [`Trainer::advance`] computes the same step again, to the same bits. An
//! update that fails halfway cannot be undone without a copy of all weights. Then the error is [`Error::Interrupted`], and the training
//! neither goes on nor saves until it has [resumed](Trainer::resume).

use runtime::random::RandomState;
use serde_json::Value;

use super::Trainer;
use crate::batches::Batches;
use crate::error::{Error, Result};

/// What a step changes before the optimizer updates weights.
pub(super) struct BeforeStep {
    /// The position of its first batch.
    data: Value,
    /// The random generators, from when its device is known.
    pub(super) random: Option<RandomState>,
}

impl BeforeStep {
    pub(super) fn of(train: &dyn Batches) -> Self {
        Self { data: train.state(), random: None }
    }
}

impl Trainer {
    /// Refuses to go on from weights that a failed step has updated in part.
    pub(super) fn refuse_interrupted(&self) -> Result<()> {
        let Some(step) = self.interrupted else { return Ok(()) };
        let reason = format!(
            "step {step} failed when a part of the weights was updated; resume from a checkpoint (`Trainer::resume`) first"
        );
        Err(Error::config("training", reason))
    }

    /// Puts back what the failed step has changed. Returns its error, or [`Error::Interrupted`] if that is impossible.
    pub(super) fn undo_step(&mut self, error: Error, before: &BeforeStep, train: &mut dyn Batches) -> Error {
        // Over ranks the others have failed too, or will: none of them can go on.
        if self.optimizer.ranks().is_none() && self.put_back(before, train).unwrap_or(false) {
            return error;
        }
        let step = self.step + 1;
        self.interrupted = Some(step);
        Error::Interrupted { step, cause: Box::new(error) }
    }

    /// Returns false if weights or state are not as before.
    fn put_back(&mut self, before: &BeforeStep, train: &mut dyn Batches) -> Result<bool> {
        let whole = self.optimizer.abandon(self.options.zero_grad)?;
        if let Some(random) = &before.random {
            random.restore()?;
        }
        train.resume(&before.data)?;
        Ok(whole)
    }
}
