//! Evaluation on data that the model is not trained on.

use std::time::Instant;

use models::module::LanguageModel;
use runtime::collectives::ReduceConfig;
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::accumulation::forward_over;
use crate::batches::Batches;
use crate::error::{Error, Result};
use crate::loss::perplexity;
use crate::ranks::Ranks;

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
    /// The mean reward, for an objective over rewards.
    pub reward: Option<f64>,
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
    evaluate_over(model, batches, step, None, false)
}

/// [`evaluate`] with the batches divided among ranks, which take [turns](crate::ranks). The result is the same
/// on every rank, and does not depend on the number of turns. If passes communicate ([`Optimizer::passes_communicate`](crate::Optimizer)), ranks run
/// `together`: one without a batch in the last round runs another's, and does not count it.
///
/// # Errors
/// As [`evaluate`]; a rank that failed.
pub fn evaluate_over(
    model: &(impl LanguageModel + ?Sized),
    batches: &mut (impl Batches + ?Sized),
    step: u64,
    ranks: Option<&Ranks>,
    together: bool,
) -> Result<Evaluation> {
    let _range = runtime::profile::range("evaluation");
    let _no_grad = tch::no_grad_guard();
    let (start, mut targets) = (Instant::now(), 0);
    let (mut sums, mut others) = (Vec::new(), None);
    let sequence = ranks.and_then(Ranks::sequence);
    while let Some(batch) = batches.next()? {
        targets += batch.counts.targets as u64;
        if ranks.is_some_and(|ranks| !ranks.takes(sums.len())) {
            sums.push(Tensor::f_zeros([2], (Kind::Double, batch.tokens.device()))?);
            others = Some(batch);
            continue;
        }
        let output = forward_over(model, &batch, (false, true), (None, sequence))?;
        let correct = output.correct.ok_or_else(|| {
            Error::config("evaluation", "the model's loss head does not count correct predictions")
        })?;
        sums.push(Tensor::f_stack(
            &[output.sum.f_to_kind(Kind::Double)?, correct.f_to_kind(Kind::Double)?],
            0,
        )?);
    }
    if let (Some(ranks), Some(batch), true) = (ranks, others, together)
        && ranks.idles(sums.len() - 1)
    {
        forward_over(model, &batch, (false, true), (None, sequence))?;
    }
    if targets == 0 {
        let reason = "the data has no token to predict; give documents of at least two tokens";
        return Err(Error::config("evaluation", reason));
    }
    let sums = Tensor::f_stack(&sums, 0)?.f_to_device(Device::Cpu)?.f_contiguous()?;
    if let Some(ranks) = ranks {
        // Zeros on all ranks but those that divide a row: exact where each takes whole rows.
        ranks.all().all_reduce(&sums, ReduceConfig::default(), "evaluation")?;
    }
    // One after the other, in the order of the batches.
    let values = runtime::ops::read(&sums.f_reshape([-1])?)?;
    let (sum, correct) =
        values.chunks_exact(2).fold((0.0, 0.0), |(sum, correct), batch| (sum + batch[0], correct + batch[1]));
    let (loss, accuracy) = (sum / targets as f64, correct / targets as f64);
    let seconds = start.elapsed().as_secs_f64();
    Ok(Evaluation { step, loss, perplexity: perplexity(loss), accuracy, targets, reward: None, seconds })
}
