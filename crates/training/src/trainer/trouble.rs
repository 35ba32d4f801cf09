//! Why a training went wrong: the step at which its loss stopped being finite, and why a checkpoint was not written.

use std::fmt;

use super::Trainer;
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

/// What is known of a training that goes wrong.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    /// The first step since the last finite loss whose loss is not finite.
    first: Option<StepFigures>,
    latest: Option<StepFigures>,
    /// Why the last checkpoint that was due was not written.
    refused: Option<&'static str>,
}

impl Trouble {
    pub(super) fn observe(&mut self, record: &StepRecord) {
        let &StepRecord { step, loss, learning_rate, gradient_norm, .. } = record;
        let figures = StepFigures { step, loss, learning_rate, gradient_norm };
        self.latest = Some(figures);
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
