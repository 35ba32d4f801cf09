//! Evaluation on data that the model is not trained on.

use std::time::Instant;

use dataloading::Batch;
use models::module::LanguageModel;
use runtime::collectives::ReduceConfig;
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::accumulation::forward_over;
use crate::batches::Batches;
use crate::distillation::{self, Distillation, DistillationFigures};
use crate::error::{Error, Result};
use crate::loss::perplexity;
use crate::ranks::Ranks;

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Evaluation {
    /// Completed steps at the time.
    pub step: u64,
    /// Mean loss over all targets, in nats; each counts with the weight of its example, if examples have weights.
    pub loss: f64,
    /// exp(loss); beside a teacher's divergence exp of the loss of the labels alone.
    pub perplexity: f64,
    /// Fraction of targets that were predicted correctly.
    pub accuracy: f64,
    /// Number of targets.
    pub targets: u64,
    /// The mean reward, for an objective over rewards.
    pub reward: Option<f64>,
    /// The divergence from a teacher and the loss of the labels, where there is one.
    pub distilled: Option<DistillationFigures>,
    /// Duration.
    pub seconds: f64,
}

/// Evaluates the model on all of `batches`, without dropout or a graph. Means are over targets, not batches; the accuracy is that of all alike. Losses are summed
/// in fp64 on the device and read once.
///
/// # Errors
/// Data without any target; those of the source and of the model.
pub fn evaluate(
    model: &(impl LanguageModel + ?Sized),
    batches: &mut (impl Batches + ?Sized),
    step: u64,
) -> Result<Evaluation> {
    evaluate_over(model, batches, step, None, (false, None))
}

/// [`evaluate`] with the batches divided among ranks, which take [turns](crate::ranks). The result is the same
/// on every rank, and does not depend on the number of turns. If passes communicate ([`Optimizer::passes_communicate`](crate::Optimizer)), ranks run
/// `together`: one without a batch in the last round runs another's, and does not count it. With a teacher the loss is that which is learned.
///
/// # Errors
/// As [`evaluate`]; a rank that failed.
pub fn evaluate_over(
    model: &(impl LanguageModel + ?Sized),
    batches: &mut (impl Batches + ?Sized),
    step: u64,
    ranks: Option<&Ranks>,
    (together, distillation): (bool, Option<&Distillation>),
) -> Result<Evaluation> {
    let _range = runtime::profile::range("evaluation");
    let _no_grad = tch::no_grad_guard();
    let (start, mut targets, mut weights) = (Instant::now(), 0, 0.0);
    let (mut sums, mut others) = (Vec::new(), None);
    let sequence = ranks.and_then(Ranks::sequence);
    // The loss that is learned and the correct predictions; with a teacher the divergence and the loss of the labels besides.
    let parts = if distillation.is_some() { 4 } else { 2 };
    let forward = |batch: &Batch| -> Result<Tensor> {
        let (sum, correct, further) = match distillation {
            Some(distillation) => {
                let loss = distillation.forward(model, batch, (false, true), (None, None))?;
                let further = distillation::parts(&loss)?;
                (loss.sum, loss.correct, Some(further))
            }
            None => {
                let output = forward_over(model, batch, (false, true), (None, sequence), None)?;
                (output.sum, output.correct, None)
            }
        };
        let correct = correct.ok_or_else(|| {
            Error::config("evaluation", "the model's loss head does not count correct predictions")
        })?;
        let both = Tensor::f_stack(&[sum.f_to_kind(Kind::Double)?, correct.f_to_kind(Kind::Double)?], 0)?;
        Ok(further.map_or(Ok(both.shallow_clone()), |further| Tensor::f_cat(&[&both, &further], 0))?)
    };
    while let Some(batch) = batches.next()? {
        targets += batch.counts.targets as u64;
        weights += batch.weights.as_ref().map_or(batch.counts.targets as f64, |weights| weights.total);
        if ranks.is_some_and(|ranks| !ranks.takes(sums.len())) {
            sums.push(Tensor::f_zeros([parts], (Kind::Double, batch.tokens.device()))?);
            others = Some(batch);
            continue;
        }
        sums.push(forward(&batch)?);
    }
    if let (Some(ranks), Some(batch), true) = (ranks, others, together)
        && ranks.idles(sums.len() - 1)
    {
        let _ = forward(&batch)?;
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
    let mut sums = [0.0; 4];
    for batch in values.chunks_exact(parts as usize) {
        sums.iter_mut().zip(batch).for_each(|(sum, value)| *sum += value);
    }
    let [loss, accuracy, divergence, cross_entropy] = sums;
    let [loss, divergence, cross_entropy] = [loss, divergence, cross_entropy].map(|sum| sum / weights);
    let accuracy = accuracy / targets as f64;
    let distilled = distillation.map(|_| DistillationFigures { divergence, cross_entropy });
    let perplexity = perplexity(distilled.map_or(loss, |own| own.cross_entropy));
    let seconds = start.elapsed().as_secs_f64();
    Ok(Evaluation { step, loss, perplexity, accuracy, targets, reward: None, distilled, seconds })
}
