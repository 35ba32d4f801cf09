//! Callbacks of a training.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

use crate::distillation::DistillationFigures;
use crate::error::Result;
use crate::evaluation::Evaluation;
use crate::policy::RolloutFigures;

/// Seconds that the host spent in the parts of a step. On CUDA work is queued, so time appears where the host next waits; a
/// trace shows the device's side, in the ranges `data`, `forward`, `backward`, `clip`, `optimizer`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Timings {
    /// Waiting for batches.
    pub data: f64,
    /// Forward passes.
    pub forward: f64,
    /// Backward passes.
    pub backward: f64,
    /// Unscaling, clipping, the optimizer's step, clearing gradients.
    pub optimizer: f64,
    /// The whole step, including reading the losses of earlier steps, without evaluations and checkpoints.
    pub total: f64,
}

/// What a step of an objective over rewards was.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PolicyRecord {
    /// The rewards and lengths of its answers.
    pub rollout: RolloutFigures,
    /// The mean of e^d − d − 1 over the tokens that are learned, an estimate of the divergence from the reference; 0 if the loss does not have it.
    pub divergence: f64,
    /// The share of those tokens whose ratio is clipped.
    pub clipped: f64,
}

/// The record of a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepRecord {
    /// Its number, from 1.
    pub step: u64,
    /// Mean loss over its targets, in nats; over its examples, for an objective over sequences.
    pub loss: f64,
    /// Fraction of correct predictions, if requested; of an objective over sequences, that of the examples that are right
    /// ([`Objective::correct_and_rewards`](crate::preference::Objective::correct_and_rewards)).
    pub accuracy: Option<f64>,
    /// The mean rewards of chosen or desirable, and of rejected or undesirable completions, for an objective over sequences. NaN without any.
    pub rewards: Option<[f64; 2]>,
    /// The rewards of answers, and how far the policy has moved, for an objective over rewards.
    pub policy: Option<PolicyRecord>,
    /// The divergence from a teacher and the loss of the labels, whose weighted mean is [`StepRecord::loss`]; `None` without a teacher.
    pub distilled: Option<DistillationFigures>,
    /// z₀ of an objective over rated answers, in nats: an estimate of the divergence from the reference.
    pub reference_point: Option<f64>,
    /// The load-balancing loss without its coefficient, which [`StepRecord::loss`] does not contain; the mean over micro-batches.
    pub router_aux_loss: Option<f64>,
    /// The first group's learning rate.
    pub learning_rate: f64,
    /// The gradient norm before clipping, if computed.
    pub gradient_norm: Option<f64>,
    /// Whether the step was skipped because a gradient was not finite.
    pub skipped: bool,
    /// How often its gradients were recomputed because they overflowed ([`Overflow::Retry`](crate::trainer::Overflow)).
    pub retries: u32,
    /// The loss scale.
    pub scale: f64,
    /// Document tokens.
    pub tokens: usize,
    /// Padding positions.
    pub padding: usize,
    /// Positions with a label.
    pub targets: usize,
    /// Times of its parts.
    pub timings: Timings,
}

/// Receives steps, evaluations and checkpoints. Steps arrive in order, but late: several losses are read at once.
#[allow(unused_variables, reason = "the defaults do nothing with what they get")]
pub trait Observer: Send {
    /// Called when a step's loss was read.
    ///
    /// # Errors
    /// Ends the training.
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        Ok(())
    }

    /// Called after an evaluation.
    ///
    /// # Errors
    /// Ends the training.
    fn on_evaluation(&mut self, evaluation: &Evaluation) -> Result<()> {
        Ok(())
    }

    /// Called when a checkpoint was written to `path`.
    ///
    /// # Errors
    /// Ends the training.
    fn on_checkpoint(&mut self, step: u64, path: &Path) -> Result<()> {
        Ok(())
    }

    /// Called when the training resumes from a checkpoint.
    ///
    /// # Errors
    /// Ends the training.
    fn on_resume(&mut self, step: u64) -> Result<()> {
        Ok(())
    }

    /// Called with lines that the user asked for, each with its newline.
    ///
    /// # Errors
    /// Ends the training.
    fn on_note(&mut self, text: &str) -> Result<()> {
        Ok(())
    }

    /// Called with a warning.
    ///
    /// # Errors
    /// Ends the training.
    fn on_warning(&mut self, warning: &str) -> Result<()> {
        Ok(())
    }
}

/// Collects the record of every step. Clones share the list: give one to the trainer and keep one.
#[derive(Debug, Clone, Default)]
pub struct Collect(Arc<Mutex<Vec<StepRecord>>>);

impl Collect {
    /// Returns the records since the last call.
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
