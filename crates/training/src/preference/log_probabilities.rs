//! The log-probabilities of the sequences of a batch.

use std::sync::Arc;

use dataloading::Batch;
use models::module::{Context, Input, LanguageModel};
use runtime::collectives::ReduceConfig;
use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

use super::sequences;
use crate::accumulation::{documents, labelled_bound};
use crate::batches::Batches;
use crate::embedding_noise::strength;
use crate::error::Result;
use crate::masked_rows::MaskedBatches;
use crate::ranks::Ranks;

/// Returns the log-probability of each sequence of a batch, `[sequences]` in fp32, without a graph.
///
/// # Errors
/// A batch without [`Sequences`](dataloading::Sequences); errors of the model.
pub fn log_probabilities(model: &dyn LanguageModel, batch: &Batch) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    Ok(sequence_sums(model, batch, None)?.f_narrow(0, 0, sequences(batch)?.count())?)
}

/// Returns the log-probabilities of the rows of a source, as [`MaskedBatches::with_reference`] takes them. Ranks divide the batches among
/// themselves ([`InTurns`]), and each gets all.
///
/// # Errors
/// Rows that are not laid out for an objective over sequences, or cannot be read; errors of the model; a rank that failed.
pub fn log_probabilities_of_rows(
    model: &dyn LanguageModel,
    rows: &MaskedBatches,
    ranks: Option<InTurns<'_>>,
) -> Result<Arc<[f32]>> {
    let numbers = |batch: &Batch| {
        let sequences = sequences(batch)?;
        Ok(sequences.count() * if sequences.ratings.is_some() { 2 } else { 1 })
    };
    let all = in_turns(&mut rows.in_row_order(), ranks, numbers, |batch| {
        let mut of_batch = vec![log_probabilities(model, batch)?];
        if let Some(ratings) = &sequences(batch)?.ratings {
            of_batch.push(log_probabilities(model, &ratings.mismatched)?);
        }
        Ok(Tensor::f_stack(&of_batch, 1)?.f_reshape([-1])?)
    })?;
    Ok(Vec::<f32>::try_from(&all)?.into())
}

/// Ranks that take batches in [turns](crate::ranks).
#[derive(Debug, Clone, Copy)]
pub struct InTurns<'a> {
    /// The ranks.
    pub ranks: &'a Ranks,
    /// Whether passes communicate ([`Optimizer::passes_communicate`](crate::Optimizer)): a rank without a batch in the last round runs another's.
    pub together: bool,
}

/// Computes `numbers(batch)` numbers of each batch, and returns those of all batches in fp32 on the host, the same on every rank.
pub(super) fn in_turns(
    source: &mut dyn Batches,
    turns: Option<InTurns<'_>>,
    mut numbers: impl FnMut(&Batch) -> Result<i64>,
    mut pass: impl FnMut(&Batch) -> Result<Tensor>,
) -> Result<Tensor> {
    let (mut all, mut others) = (Vec::new(), None);
    while let Some(batch) = source.next()? {
        let numbers = numbers(&batch)?;
        if turns.is_some_and(|turns| !turns.ranks.takes(all.len())) {
            all.push(Tensor::f_zeros([numbers], (Kind::Float, batch.tokens.device()))?);
            others = Some(batch);
        } else {
            all.push(pass(&batch)?);
        }
    }
    if all.is_empty() {
        return Ok(Tensor::f_zeros([0], (Kind::Float, Device::Cpu))?);
    }
    let idle = turns.filter(|turns| turns.together && turns.ranks.idles(all.len() - 1));
    if let (Some(batch), Some(_)) = (others, idle) {
        let _others = pass(&batch)?;
    }
    let all = Tensor::f_cat(&all, 0)?.f_to_device(Device::Cpu)?.f_contiguous()?;
    if let Some(InTurns { ranks, .. }) = turns {
        // Each number is one rank's, and 0 on the others.
        ranks.all().all_reduce(&all, ReduceConfig::default(), "log-probabilities")?;
    }
    Ok(all)
}

/// Returns the log-probability of the labels of each sequence of a batch, and behind them that of the prompts' tokens, each times the weight
/// of its example: `[sequences + 1]`. With [noise](crate::embedding_noise) of this α, if there is one.
pub(super) fn sequence_sums(model: &dyn LanguageModel, batch: &Batch, noise: Option<f64>) -> Result<Tensor> {
    let sequences = sequences(batch)?;
    let noise = noise.map(|alpha| strength(batch, alpha)).transpose()?;
    let documents = documents(batch)?;
    let input = Input {
        tokens: &batch.tokens,
        positions: batch.packing.as_ref().map(|packing| &packing.positions),
        context: Context {
            documents: documents.as_ref(),
            labelled_tokens: labelled_bound(batch.counts.targets, batch.tokens.numel()),
            embedding_noise: noise.as_ref(),
            ..Context::default()
        },
    };
    let losses = model.token_losses(&input, &batch.labels)?.f_reshape([1, -1])?;
    let numbers =
        Tensor::try_arange(sequences.count() + 1, (Kind::Int64, losses.device()))?.f_unsqueeze(1)?;
    // A sum over all positions for each sequence, whose order does not depend on threads.
    let is_own = sequences.ids.f_reshape([1, -1])?.f_eq_tensor(&numbers)?;
    let mut own = losses.f_where_self(&is_own, &Tensor::f_zeros([], (losses.kind(), losses.device()))?)?;
    if let Some(weights) = &batch.weights {
        let (of_sequences, of_prompts) = (own.f_narrow(0, 0, sequences.count())?, own.f_narrow(0, -1, 1)?);
        own = Tensor::f_cat(&[of_sequences, of_prompts.f_mul(&weights.positions.f_reshape([1, -1])?)?], 0)?;
    }
    Ok(own.f_sum_dim_intlist([1].as_slice(), false, Kind::Float)?.f_neg()?)
}
