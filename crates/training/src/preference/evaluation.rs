//! The loss of preferences on data that are not trained on.

use std::time::Instant;

use models::module::LanguageModel;
use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

use super::log_probabilities::{InTurns, in_turns};
use super::{LogProbabilities, Preference, Rated, reference_point, sequences};
use crate::batches::Batches;
use crate::error::{Error, Result};
use crate::evaluation::Evaluation;

/// Evaluates the model on all examples of `batches`, without dropout or a graph: the mean loss (with [weights](dataloading::ExampleWeights) a weighted one), and as accuracy the fraction of examples that
/// are right ([`Objective::correct_and_rewards`](super::Objective::correct_and_rewards)). [`Evaluation::targets`] counts examples; a
/// perplexity there is none (NaN). Ranks divide the batches among themselves, and each returns the whole.
///
/// # Errors
/// Data without any example; those of the source and of the model; a rank that failed.
pub fn evaluate(
    preference: &Preference,
    model: &dyn LanguageModel,
    batches: &mut dyn Batches,
    step: u64,
    ranks: Option<InTurns<'_>>,
) -> Result<Evaluation> {
    let _range = runtime::profile::range("evaluation");
    let _no_grad = tch::no_grad_guard();
    let (start, objective) = (Instant::now(), &preference.objective);
    let (mut data, mut examples, mut chosen_targets) = (Vec::new(), 0, 0.0);
    let (mut weights, mut total) = (Vec::new(), 0.0);
    let numbers = |batch: &dataloading::Batch| {
        let of_batch = sequences(batch)?;
        examples += of_batch.examples();
        match &batch.weights {
            None => {
                (total, chosen_targets) =
                    (total + of_batch.examples() as f64, chosen_targets + of_batch.chosen_targets as f64)
            }
            Some(own) => {
                (total, chosen_targets) = (total + own.total, chosen_targets + own.chosen_targets);
                let of_examples = own.examples.as_ref().map(|weights| weights.f_to_device(Device::Cpu));
                weights.extend(of_examples.transpose()?);
            }
        }
        let signs = of_batch.ratings.as_ref().map(|ratings| ratings.signs.f_to_device(Device::Cpu));
        data.push((of_batch.lengths.f_to_device(Device::Cpu)?, signs.transpose()?));
        let sums = if objective.has_reference() { 2 } else { 1 };
        Ok(sums * of_batch.count()
            + i64::from(objective.chosen_loss() != 0.0)
            + i64::from(objective.is_rated()))
    };
    let all = in_turns(batches, ranks, numbers, |batch| {
        let scores = preference.scores(model, batch, None)?;
        let single = [scores.chosen, preference.divergence(model, batch)?];
        let single = single.into_iter().flatten().map(|number| number.f_reshape([1]));
        let parts = std::iter::once(Ok(scores.sums)).chain(scores.reference.map(Ok)).chain(single);
        Ok(Tensor::f_cat(&parts.collect::<std::result::Result<Vec<_>, _>>()?, 0)?)
    })?;
    if examples == 0 {
        return Err(Error::config("evaluation", "the data has no example"));
    }
    let mut numbers = Numbers { all, position: 0 };
    let (mut sums, mut reference, mut lengths, mut signs) = (vec![], vec![], vec![], vec![]);
    let (mut chosen, mut divergence) = (vec![], vec![]);
    for (of_batch, of_ratings) in data {
        let count = of_batch.numel() as i64;
        sums.push(numbers.next(count)?);
        if objective.has_reference() {
            reference.push(numbers.next(count)?);
        }
        if objective.chosen_loss() != 0.0 {
            chosen.push(numbers.next(1)?);
        }
        if objective.is_rated() {
            divergence.push(numbers.next(1)?);
        }
        lengths.push(of_batch);
        signs.extend(of_ratings);
    }
    let joined = |parts: &[Tensor]| (!parts.is_empty()).then(|| Tensor::f_cat(parts, 0)).transpose();
    let added = |parts: &[Tensor]| -> Result<Tensor> {
        let all = joined(parts)?.map(|all| all.f_sum(Kind::Double)).transpose()?;
        Ok(all.map_or_else(|| Tensor::f_zeros([], (Kind::Double, Device::Cpu)), Ok)?)
    };
    let (reference, signs) = (joined(&reference)?, joined(&signs)?);
    let point = reference_point(&added(&divergence)?, examples)?;
    let (sums, lengths) = (Tensor::f_cat(&sums, 0)?, Tensor::f_cat(&lengths, 0)?);
    let given = LogProbabilities {
        sums: &sums,
        lengths: &lengths,
        reference: reference.as_ref(),
        ratings: signs.as_ref().map(|signs| Rated { signs, reference_point: &point }),
    };
    let mut losses = objective.losses(&given)?;
    if let Some(weights) = joined(&weights)? {
        losses = losses.f_mul(&weights)?;
    }
    let losses = losses.f_sum(Kind::Double)?;
    let [correct, _] = objective.correct_and_rewards(&given)?;
    let values = [losses, correct.f_to_kind(Kind::Double)?, added(&chosen)?.try_mul_scalar(-1.0)?];
    let values = runtime::ops::read(&Tensor::f_stack(&values, 0)?)?;
    let of_chosen =
        objective.chosen_loss() * values[2] / if chosen_targets > 0.0 { chosen_targets } else { 1.0 };
    Ok(Evaluation {
        step,
        loss: values[0] / total + of_chosen,
        perplexity: f64::NAN,
        accuracy: values[1] / examples as f64,
        targets: examples as u64,
        reward: None,
        distilled: None,
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// The numbers of all batches, one after the other.
struct Numbers {
    all: Tensor,
    position: i64,
}

impl Numbers {
    fn next(&mut self, count: i64) -> Result<Tensor> {
        let next = self.all.f_narrow(0, self.position, count)?;
        self.position += count;
        Ok(next)
    }
}
