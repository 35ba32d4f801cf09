//! Who is told what happens in a training.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

use crate::error::Result;
use crate::evaluation::Evaluation;

/// Seconds that the host spent in the parts of a step. On CUDA work is queued, so that a part's own time is not where it was
/// queued but where the host next waits; a trace shows the device's side, under the ranges `data`, `forward`, `backward`,
/// `clip`, `optimizer`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Timings {
    /// Waiting for batches.
    pub data: f64,
    /// Forward passes.
    pub forward: f64,
    /// Backward passes.
    pub backward: f64,
    /// Unscaling, clipping, the optimizer's step, clearing the gradients.
    pub optimizer: f64,
    /// The whole step, and reading the losses of those before; evaluations and checkpoints are not in it.
    pub total: f64,
}

/// What is known of a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepRecord {
    /// Its number, from 1.
    pub step: u64,
    /// Mean loss of its targets, in nats.
    pub loss: f64,
    /// Share of its targets that were predicted right, where that was asked for.
    pub accuracy: Option<f64>,
    /// The first group's learning rate.
    pub learning_rate: f64,
    /// The gradients' norm before clipping, where it was computed.
    pub gradient_norm: Option<f64>,
    /// Whether the optimizer passed it over, because a gradient was not finite.
    pub skipped: bool,
    /// How often its gradients were computed again, because they overflowed ([`Overflow::Retry`](crate::trainer::Overflow)).
    pub retries: u32,
    /// The loss's scale.
    pub scale: f64,
    /// Tokens of documents.
    pub tokens: usize,
    /// Places that padded.
    pub padding: usize,
    /// Places that had something to predict.
    pub targets: usize,
    /// Where its time went.
    pub timings: Timings,
}

/// Is told of steps, evaluations and checkpoints. Steps come in order, but late: losses are read several at a time.
#[allow(unused_variables, reason = "the defaults do nothing with what they get")]
pub trait Observer: Send {
    /// A step's loss was read.
    ///
    /// # Errors
    /// Ends the training.
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        Ok(())
    }

    /// The model was evaluated.
    ///
    /// # Errors
    /// Ends the training.
    fn on_evaluation(&mut self, evaluation: &Evaluation) -> Result<()> {
        Ok(())
    }

    /// A checkpoint lies at `path`.
    ///
    /// # Errors
    /// Ends the training.
    fn on_checkpoint(&mut self, step: u64, path: &Path) -> Result<()> {
        Ok(())
    }

    /// The training goes on from a checkpoint.
    ///
    /// # Errors
    /// Ends the training.
    fn on_resume(&mut self, step: u64) -> Result<()> {
        Ok(())
    }

    /// Lines that the user asked to see, each with its end.
    ///
    /// # Errors
    /// Ends the training.
    fn on_note(&mut self, text: &str) -> Result<()> {
        Ok(())
    }

    /// Something that the user should know, and that ends nothing.
    ///
    /// # Errors
    /// Ends the training.
    fn on_warning(&mut self, warning: &str) -> Result<()> {
        Ok(())
    }
}

/// Keeps the record of every step. Clones share them: one goes to the training, one stays outside.
#[derive(Debug, Clone, Default)]
pub struct Collect(Arc<Mutex<Vec<StepRecord>>>);

impl Collect {
    /// The records since the last call.
    pub fn take(&self) -> Vec<StepRecord> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Observer for Collect {
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(record.clone());
        Ok(())
    }
}
