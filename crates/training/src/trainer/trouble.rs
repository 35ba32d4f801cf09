//! Why a training went wrong: the step at which its loss stopped being finite, the weight that is the reason, steps that were skipped, and
//! why a checkpoint was not written.
//!
//! A loss that is not finite says nothing of its reason. Weights are read only then: a frozen one that is not finite will never be, and
//! ends the training; one that is trained is named when the training diverges, and by [`Trainer::non_finite_weight`]. Otherwise the
//! steps were skipped ([`NonFinite`]), and the next ones decide ([`Divergence`](crate::divergence::Divergence)).

use std::fmt;

use models::module::first_non_finite_of;
use tch::Tensor;

use super::Trainer;
use crate::clip::NonFinite;
use crate::error::{Error, Result};
use crate::observer::StepRecord;

/// A step as far as it explains a loss that is not finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepFigures {
    /// The step, from 1.
    pub step: u64,
    /// Its loss, before its update.
    pub loss: f64,
    /// The learning rate of its update.
    pub learning_rate: f64,
    /// The gradient norm before clipping; `None` without clipping.
    pub gradient_norm: Option<f64>,
}

impl fmt::Display for StepFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, loss, learning_rate, gradient_norm } = self;
        write!(f, "the loss is {loss:.4} at step {step}, with a learning rate of {learning_rate:e} and ")?;
        match gradient_norm {
            Some(norm) => write!(f, "a gradient norm of {norm:.4}"),
            None => f.write_str("gradients that are not clipped"),
        }
    }
}

/// The signs of a training that goes wrong.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    /// The first step since the last finite loss whose loss is not finite.
    first: Option<StepFigures>,
    latest: Option<StepFigures>,
    /// Steps of this process, and how many of them updated weights.
    steps: u64,
    updates: u64,
    /// Why the last checkpoint that was due was not written.
    refused: Option<&'static str>,
}

impl Trouble {
    pub(super) fn observe(&mut self, record: &StepRecord) {
        let &StepRecord { step, loss, learning_rate, gradient_norm, .. } = record;
        let figures = StepFigures { step, loss, learning_rate, gradient_norm };
        self.latest = Some(figures);
        self.steps += 1;
        self.updates += u64::from(!record.skipped);
        self.first = if loss.is_finite() { None } else { self.first.or(Some(figures)) };
    }

    pub(super) fn refuse(&mut self, reason: &'static str) {
        self.refused = Some(reason);
    }

    pub(super) fn save(&mut self) {
        self.refused = None;
    }
}

impl Trainer {
    /// Returns whether this training has run steps, and has skipped every one of them.
    pub fn has_skipped_all(&self) -> bool {
        self.trouble.steps > 0 && self.trouble.updates == 0
    }

    /// Looks for a frozen weight that explains the latest loss, if that is the first which is not finite.
    ///
    /// # Errors
    /// Such a weight.
    pub(super) fn explain_first(&self, record: &StepRecord) -> Result<()> {
        match self.trouble.first {
            Some(first) if first.step == record.step && self.options.non_finite != NonFinite::Ignore => {
                self.refuse_weights(&format!("the loss of step {}", record.step), record.loss, true)
            }
            _ => Ok(()),
        }
    }

    /// Refuses a model with a weight that is not finite. All ranks call it.
    ///
    /// # Errors
    /// The first such weight.
    pub(super) fn refuse_weights(&self, what: &str, loss: f64, frozen_only: bool) -> Result<()> {
        match self.first_non_finite_weight(frozen_only)? {
            Some(weight) => Err(Error::NonFiniteWeight { what: what.to_owned(), loss, weight }),
            None => Ok(()),
        }
    }

    /// Returns the name of the first of the model's tensors that has an infinity or a NaN, after a loss that is not finite; from one read
    /// of all. All ranks call it.
    ///
    /// # Errors
    /// A rank that failed.
    pub fn non_finite_weight(&self) -> Result<Option<String>> {
        self.first_non_finite_weight(false)
    }

    fn first_non_finite_weight(&self, frozen_only: bool) -> Result<Option<String>> {
        self.optimizer.synchronize()?;
        first_non_finite_of(self.model.as_ref(), |tensor: &Tensor| {
            match frozen_only && tensor.requires_grad() {
                true => Ok(None),
                false => self.optimizer.whole_weight(tensor).map(Some),
            }
        })
    }

    /// Returns the first step of those up to the latest whose losses are not finite; `None` if the latest loss that was read is finite.
    pub fn first_non_finite(&self) -> Option<StepFigures> {
        self.trouble.first
    }

    /// Returns why the last checkpoint that was due was not written, with the figures of the step that explains it; `None` if it was
    /// written.
    pub fn refused_checkpoint(&self) -> Option<String> {
        let reason = self.trouble.refused?;
        let figures = self.trouble.first.or(self.trouble.latest);
        Some(figures.map_or_else(|| reason.to_owned(), |figures| format!("{reason}: {figures}")))
    }
}
