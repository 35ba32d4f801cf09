//! Evaluations of a training, and the best of them: which weights to keep, and when to stop.
//!
//! An evaluation with a loss below all before it is the best. [`Trainer::best`](super::Trainer::best) then keeps the weights, before the
//! checkpoint of that step is written. A checkpoint contains the best evaluation so far, so a training that is resumed keeps the same
//! weights, and stops at the same step, as one that was never stopped.

use std::time::Instant;

use models::module::LanguageModel;
use runtime::memory;
use serde::{Deserialize, Serialize};

use super::Trainer;
use crate::batches::Batches;
use crate::error::{Error, Result};
use crate::evaluation::{Evaluation, evaluate_over};
use crate::optimizer::Optimizer;
use crate::preference::{self, InTurns};

/// The best evaluation so far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Its loss in nats.
    pub loss: f64,
    /// Completed steps at the time.
    pub step: u64,
    /// Number of evaluations since then; no one was better.
    pub evaluations_since: u64,
}

impl Best {
    /// Returns whether `patience` evaluations in a row were not better. Without a patience it never is.
    pub fn exhausts(&self, patience: Option<u64>) -> bool {
        patience.is_some_and(|patience| self.evaluations_since >= patience)
    }
}

/// Keeps the weights of the best evaluation, for example as a file.
pub trait BestWeights {
    /// Called after an evaluation that is the best so far, on every rank. The optimizer gathers sharded weights.
    ///
    /// # Errors
    /// Ends the training.
    fn keep(&mut self, model: &dyn LanguageModel, optimizer: &dyn Optimizer, best: &Best) -> Result<()>;
}

impl Trainer {
    /// Evaluates the model, reports to the observers, and restores the position of `validation`.
    ///
    /// # Errors
    /// A loss that is not finite because a weight is not; those of the data, the model and the observers.
    pub fn evaluate(&mut self, validation: &mut dyn Batches) -> Result<()> {
        let began = Instant::now();
        let start = validation.state();
        let mut evaluation = self.evaluated(validation);
        let is_short = evaluation.as_ref().is_err_and(Error::is_out_of_memory);
        if is_short && self.captured.drop_graphs() {
            // Without the memory of captured steps.
            validation.resume(&start)?;
            self.devices().into_iter().try_for_each(memory::empty_cache)?;
            evaluation = self.evaluated(validation);
        }
        let restored = validation.resume(&start);
        let evaluation = evaluation?;
        restored?;
        self.tell(|observer| observer.on_evaluation(&evaluation))?;
        if !evaluation.loss.is_finite() {
            self.refuse_weights("the validation loss", evaluation.loss, false)?;
        }
        self.compare_with_best(&evaluation)?;
        // Not part of the next step's time.
        self.last += began.elapsed();
        Ok(())
    }

    fn evaluated(&mut self, validation: &mut dyn Batches) -> Result<Evaluation> {
        let _precision = self.enter_precision();
        let (ranks, together) = (self.optimizer.ranks(), self.optimizer.passes_communicate());
        if let Some(policy) = &mut self.policy {
            return policy.evaluate(self.model.as_ref(), &validation.prompts()?, self.step, ranks.as_ref());
        }
        if let Some(preference) = &self.preference {
            let turns = ranks.as_ref().map(|ranks| InTurns { ranks, together });
            return preference::evaluate(preference, self.model.as_ref(), validation, self.step, turns);
        }
        let with = (together, self.distillation.as_ref());
        evaluate_over(self.model.as_ref(), validation, self.step, ranks.as_ref(), with)
    }

    /// Takes an evaluation into account. That of the untrained model is not a candidate.
    fn compare_with_best(&mut self, evaluation: &Evaluation) -> Result<()> {
        let &Evaluation { step, loss, .. } = evaluation;
        match &mut self.best_so_far {
            _ if step == 0 => {}
            // Evaluated again, by a resume from that step.
            Some(best) if best.step == step => {}
            Some(best) if loss.is_nan() || loss >= best.loss => best.evaluations_since += 1,
            None if loss.is_nan() => {}
            best => {
                let new = Best { loss, step, evaluations_since: 0 };
                *best = Some(new);
                self.optimizer.synchronize()?;
                if let Some(keeper) = &mut self.best {
                    keeper.keep(self.model.as_ref(), self.optimizer.as_ref(), &new)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the best evaluation so far; `None` before the first.
    pub fn best_evaluation(&self) -> Option<Best> {
        self.best_so_far
    }
}
