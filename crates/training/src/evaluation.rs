//! Evaluation on data that the model is not trained on.

use std::time::Instant;

use models::module::LanguageModel;
use serde::Serialize;
use tch::{Kind, Tensor};

use crate::accumulation::forward;
use crate::batches::Batches;
use crate::error::{Error, Result};
use crate::loss::perplexity;

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Evaluation {
    /// Completed steps at the time.
    pub step: u64,
    /// Mean loss over all targets, in nats.
    pub loss: f64,
    /// exp(loss).
    pub perplexity: f64,
    /// Fraction of targets that were predicted correctly.
    pub accuracy: f64,
    /// Number of targets.
    pub targets: u64,
    /// Duration.
    pub seconds: f64,
}

/// Evaluates the model on all of `batches`, without dropout or a graph. Means are over targets, not batches. Losses are summed
/// in fp64 on the device and read once.
///
/// # Errors
/// Data without any target; those of the source and of the model.
pub fn evaluate(
    model: &(impl LanguageModel + ?Sized),
    batches: &mut (impl Batches + ?Sized),
    step: u64,
) -> Result<Evaluation> {
    let _range = runtime::profile::range("evaluation");
    let _no_grad = tch::no_grad_guard();
    let (start, mut targets) = (Instant::now(), 0);
    let mut sums: Option<Tensor> = None;
    while let Some(batch) = batches.next()? {
        targets += batch.counts.targets as u64;
        let output = forward(model, &batch, false, true)?;
        let correct = output.correct.ok_or_else(|| {
            Error::config("evaluation", "the model's loss head does not count correct predictions")
        })?;
        let both =
            Tensor::f_stack(&[output.sum.f_to_kind(Kind::Double)?, correct.f_to_kind(Kind::Double)?], 0)?;
        sums = Some(match sums {
            Some(sums) => sums.f_add(&both)?,
            None => both,
        });
    }
    let sums = sums.filter(|_| targets > 0).ok_or_else(|| {
        Error::config("evaluation", "the data has no token to predict; give documents of at least two tokens")
    })?;
    let [sum, correct] = [0, 1].map(|index| sums.f_double_value(&[index]));
    let (loss, accuracy) = (sum? / targets as f64, correct? / targets as f64);
    let seconds = start.elapsed().as_secs_f64();
    Ok(Evaluation { step, loss, perplexity: perplexity(loss), accuracy, targets, seconds })
}
