//! A step that fails leaves the training as it was before it, or says that it could not.
//!
//! Until the optimizer updates weights, a step changes nothing that cannot be put back: its gradients are dropped, the random generators
//! and the data's position are set back, and the next call of [`Trainer::advance`] computes the same step again, to the same bits. An
//! update that fails halfway cannot be undone without a copy of all weights. Then the error is [`Error::Interrupted`], and the training
//! neither goes on nor saves until it has [resumed](Trainer::resume).

use runtime::random::RandomState;
use serde_json::Value;
use tch::Device;

use super::Trainer;
use crate::batches::Batches;
use crate::error::{Error, Result};
use crate::scaler::GradScaler;

/// The state that a step changes before the optimizer updates weights.
pub(super) struct BeforeStep {
    /// The position of its first batch.
    data: Value,
    /// The random generators, from which the data may draw, too.
    random: RandomState,
    /// The scaler's state; `None` if reading it would wait for the device.
    scaler: Option<Value>,
}

impl BeforeStep {
    pub(super) fn of(train: &dyn Batches, scaler: &mut dyn GradScaler, devices: &[Device]) -> Result<Self> {
        let random = RandomState::capture_on(devices)?;
        let on_host = scaler.device_scaler().is_none();
        Ok(Self { data: train.state(), random, scaler: on_host.then(|| scaler.state()) })
    }
}

impl Trainer {
    /// Refuses to go on from weights that a failed step has updated in part.
    pub(super) fn refuse_interrupted(&self) -> Result<()> {
        let Some(step) = self.interrupted else { return Ok(()) };
        let reason = format!(
            "step {step} failed and could not be undone; resume from a checkpoint (`Trainer::resume`) first"
        );
        Err(Error::config("training", reason))
    }

    /// Puts back what the failed step has changed. Returns its error, or [`Error::Interrupted`] if that is impossible.
    pub(super) fn undo_step(&mut self, error: Error, before: &BeforeStep, train: &mut dyn Batches) -> Error {
        if self.interrupted.is_some() {
            return error;
        }
        if self.optimizer.ranks().is_some() {
            // The others have failed too, or will: none of them can go on before it resumes. The first error is the one to report.
            let _ = self.optimizer.zero_grad(self.options.zero_grad);
            self.interrupted = Some(self.step + 1);
            return error;
        }
        match self.put_back(before, train) {
            Ok(true) => error,
            Ok(false) | Err(_) => self.interrupt(self.step + 1, error),
        }
    }

    /// Notes that `step` has left weights or state that belong to no step.
    pub(super) fn interrupt(&mut self, step: u64, cause: Error) -> Error {
        self.interrupted = Some(step);
        Error::Interrupted { step, cause: Box::new(cause) }
    }

    /// Waits until all steps are done; a step that failed meanwhile was not undone.
    pub(super) fn finish_updates(&mut self) -> Result<()> {
        self.optimizer.synchronize().map_err(|error| self.interrupt(self.step, error))
    }

    /// Returns false if weights or state are not as before.
    fn put_back(&mut self, before: &BeforeStep, train: &mut dyn Batches) -> Result<bool> {
        self.captured.drop_graphs();
        let is_undone = self.optimizer.abandon(self.options.zero_grad)?;
        before.random.restore()?;
        // Loading a state also forgets that gradients were unscaled.
        let scaler = before.scaler.clone().unwrap_or_else(|| self.scaler.state());
        self.scaler.load_state(&scaler)?;
        train.resume(&before.data)?;
        Ok(is_undone)
    }
}
