//! Losses of preferences: pairs of completions of one prompt, a chosen and a rejected one, or single completions that are rated desirable
//! or undesirable.
//!
//! With S the log-probability of a completion (the sum over its n tokens, the end token among them), Ŝ that by a reference model, a = S/n,
//! s = S − Ŝ, sp(x) = ln(1 + eˣ), and w and l for the chosen and the rejected completion, the loss of an example is
//!
//! | objective | loss | reward of a completion |
//! |---|---|---|
//! | [`Dpo`](Objective::Dpo) | (1 − ε)·sp(−β·Δ) + ε·sp(β·Δ), Δ = s_w − s_l | β·s |
//! | [`Ipo`](Objective::Ipo) | (s_w/n_w − s_l/n_l − 1/(2β))² | β·s |
//! | [`SimPo`](Objective::SimPo) | sp(γ − β·(a_w − a_l)) | β·a |
//! | [`Cpo`](Objective::Cpo) | sp(−β·(S_w − S_l)) + α·N_w | β·S |
//! | [`Orpo`](Objective::Orpo) | N′_w + λ·sp(o_l − o_w), o = a − ln(1 − eᵃ) | λ·a |
//! | [`Kto`](Objective::Kto), desirable | λ_D·σ(−β·(s − z₀)) | β·s |
//! | [`Kto`](Objective::Kto), undesirable | λ_U·σ(−β·(z₀ − s)) | β·s |
//!
//! N_w is the mean loss of the tokens of all chosen completions of a step, and N′_w that of their prompts too; the rest is a mean over the
//! step's examples. z₀ = max(0, mean of S′ − Ŝ′), over completions of other prompts than the example's, all of the step's: how far the model is from
//! the reference on what it was not asked. It is computed before the step's first backward, and has no gradient; an evaluation has that of
//! all its rows. With weights of examples ([`ExampleWeights`](dataloading::ExampleWeights)) each of these means but z₀ is a weighted one. Sources: Rafailov et al., arXiv:2305.18290 (DPO; with ε: Mitchell, "A note on DPO with noisy preferences"); Azar et al.,
//! arXiv:2310.12036 (IPO); Meng et al., arXiv:2405.14734 (SimPO); Xu et al., arXiv:2401.08417 (CPO); Hong et al., arXiv:2403.07691 (ORPO);
//! Ethayarajh et al., arXiv:2402.01306 (KTO; the authors' code takes z₀ from a micro-batch, so that its size changes the loss).
//! IPO divides by the number of tokens, as TRL does on its authors' word; ORPO's N′_w has the prompt, as its authors' code does.
//!
//! An objective depends on the model through S alone, and a loss that never holds all logits gives that. Sums and losses are in fp32.
//!
//! Dropout is off, as the difference of two log-probabilities needs it: that of masks would be more than what is learned in a step.
//!
//! # The reference
//!
//! Where adapters alone are trained, from the model's start, the reference is the model without them ([`Preference::switch`]): it takes no
//! memory, and a forward more for each step. Its log-probabilities can instead be computed once, before the first step
//! ([`log_probabilities_of_rows`]), and kept with the rows ([`MaskedBatches::with_reference`](crate::masked_rows::MaskedBatches::with_reference)), 4 bytes each: by any model, also where all
//! weights are trained.
//!
//! ```
//! use tch::Tensor;
//! use training::preference::{LogProbabilities, Objective};
//!
//! // Before training the model is its own reference, and the loss of DPO is ln 2.
//! let sums = Tensor::from_slice(&[-20.0f32, -30.0]);
//! let lengths = Tensor::from_slice(&[10.0f32, 12.0]);
//! let given = LogProbabilities { sums: &sums, lengths: &lengths, reference: Some(&sums), ratings: None };
//! let losses = Objective::Dpo { beta: 0.1, label_smoothing: 0.0 }.losses(&given)?;
//! assert!((losses.double_value(&[0]) - 2f64.ln()).abs() < 1e-6);
//! # Ok::<(), training::Error>(())
//! ```

mod evaluation;
mod log_probabilities;
mod objective;

use std::any::Any;
use std::fmt;

use dataloading::{Batch, Sequences};
use models::module::LanguageModel;
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use self::log_probabilities::sequence_sums;
use self::objective::of_chosen;
use crate::accumulation::MicroBatches;
use crate::error::{Error, Result};

pub use evaluation::evaluate;
pub use log_probabilities::{InTurns, log_probabilities, log_probabilities_of_rows};
pub use objective::{LogProbabilities, Objective, Rated};

/// Turns off what is trained, as long as its result lives.
pub type Switch =
    Box<dyn Fn() -> std::result::Result<Box<dyn Any>, Box<dyn std::error::Error + Send + Sync>> + Send>;

/// A training on preferences.
pub struct Preference {
    /// What is learned.
    pub objective: Objective,
    /// Makes the model the reference, for batches without [`Sequences::reference`].
    pub switch: Option<Switch>,
}

impl fmt::Debug for Preference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Preference").field("objective", &self.objective).finish_non_exhaustive()
    }
}

/// Sums over the examples of a batch.
#[derive(Debug)]
pub struct PreferenceSums {
    /// Of the losses of examples, each times its weight: a scalar.
    pub losses: Tensor,
    /// Of the losses of chosen tokens, each times its weight, if they are learned, too: a scalar.
    pub chosen: Option<Tensor>,
    /// The number of examples that are right ([`Objective::correct_and_rewards`]); int64, a scalar.
    pub correct: Tensor,
    /// The rewards of chosen or desirable, and of rejected or undesirable completions `[2]`, without a graph.
    pub rewards: Tensor,
}

/// What a model says of a batch.
struct Scores {
    /// S `[sequences]`.
    sums: Tensor,
    /// The log-probability of the chosen completions and of the prompts that are learned, times the weights of their examples: a scalar.
    chosen: Option<Tensor>,
    /// Ŝ `[sequences]`, for an objective with a reference.
    reference: Option<Tensor>,
}

impl Scores {
    fn log_probabilities<'a>(&'a self, of: &'a Sequences, point: Option<&'a Tensor>) -> LogProbabilities<'a> {
        let ratings = of.ratings.as_ref().zip(point);
        LogProbabilities {
            sums: &self.sums,
            lengths: &of.lengths,
            reference: self.reference.as_ref(),
            ratings: ratings
                .map(|(ratings, reference_point)| Rated { signs: &ratings.signs, reference_point }),
        }
    }
}

impl Preference {
    /// Computes the sums of a batch over its examples. `reference_point` is z₀ of the step, for an objective over rated answers
    /// ([`reference_point`]).
    ///
    /// # Errors
    /// A batch without [`Sequences`]; no reference where the objective needs one; errors of the model.
    pub fn forward(
        &self,
        model: &dyn LanguageModel,
        batch: &Batch,
        reference_point: Option<&Tensor>,
    ) -> Result<PreferenceSums> {
        self.forward_with_noise(model, batch, reference_point, None)
    }

    /// [`Preference::forward`] with [noise](crate::embedding_noise) of this α in the embeddings of the model that is trained.
    pub(crate) fn forward_with_noise(
        &self,
        model: &dyn LanguageModel,
        batch: &Batch,
        reference_point: Option<&Tensor>,
        noise: Option<f64>,
    ) -> Result<PreferenceSums> {
        let scores = self.scores(model, batch, noise)?;
        let given = scores.log_probabilities(sequences(batch)?, reference_point);
        let mut losses = self.objective.losses(&given)?;
        if let Some(weights) = batch.weights.as_ref().and_then(|weights| weights.examples.as_ref()) {
            losses = losses.f_mul(weights)?;
        }
        let losses = losses.f_sum(Kind::Float)?;
        let [correct, rewards] = self.objective.correct_and_rewards(&given)?;
        let chosen = scores.chosen.map(|sum| sum.f_neg()).transpose()?;
        Ok(PreferenceSums { losses, chosen, correct, rewards })
    }

    /// Returns the sum of S′ − Ŝ′ over the mismatched sequences of a batch, fp32, a scalar without a graph; `None` for an objective over pairs.
    ///
    /// # Errors
    /// As [`Preference::forward`]; a batch without ratings.
    pub fn divergence(&self, model: &dyn LanguageModel, batch: &Batch) -> Result<Option<Tensor>> {
        if !self.objective.is_rated() {
            return Ok(None);
        }
        let Some(ratings) = &sequences(batch)?.ratings else {
            return Err(Error::config(
                "objective",
                "it learns from rated answers, and the batch has no ratings",
            ));
        };
        let _no_grad = tch::no_grad_guard();
        let Scores { sums, reference, .. } = self.scores(model, &ratings.mismatched, None)?;
        let reference = reference.map_or_else(|| sums.f_zeros_like(), Ok)?;
        Ok(Some(sums.f_sub(&reference)?.f_sum(Kind::Float)?))
    }

    fn scores(&self, model: &dyn LanguageModel, batch: &Batch, noise: Option<f64>) -> Result<Scores> {
        let sequences = sequences(batch)?;
        let reference = match &sequences.reference {
            _ if !self.objective.has_reference() => None,
            Some(known) => Some(known.shallow_clone()),
            None => Some(self.reference(model, batch)?),
        };
        let all = sequence_sums(model, batch, noise)?;
        let count = sequences.count();
        let sums = all.f_narrow(0, 0, count)?;
        let chosen = match self.objective.chosen_loss() {
            0.0 => None,
            _ => {
                let of_prompts = all.f_narrow(0, count, 1)?.f_sum(Kind::Float)?;
                let mut chosen = of_chosen(&sums)?;
                if let Some(weights) = batch.weights.as_ref().and_then(|weights| weights.examples.as_ref()) {
                    chosen = chosen.f_mul(weights)?;
                }
                Some(chosen.f_sum(Kind::Float)?.f_add(&of_prompts)?)
            }
        };
        Ok(Scores { sums, chosen, reference })
    }

    fn reference(&self, model: &dyn LanguageModel, batch: &Batch) -> Result<Tensor> {
        let Some(switch) = &self.switch else {
            let reason = "it compares with a reference model, and there is none: no adapters that can be turned off, and no log-probabilities \
                          that were computed before";
            return Err(Error::config("objective", reason));
        };
        let off = switch().map_err(runtime::Error::Other)?;
        let sums = log_probabilities(model, batch);
        drop(off);
        sums
    }
}

impl PreferenceSums {
    /// Returns the summed loss of the micro-batch, whose denominator is the number of examples of the step.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn total(&self, objective: &Objective, step: &MicroBatches) -> Result<Tensor> {
        let Some(chosen) = &self.chosen else { return Ok(self.losses.shallow_clone()) };
        let of_each = objective.chosen_loss() * step.denominator() / step.chosen_targets();
        Ok(self.losses.f_add(&chosen.try_mul_scalar(of_each)?)?)
    }
}

/// Returns z₀ of `examples` with this sum of S′ − Ŝ′.
///
/// # Errors
/// Errors of libtorch.
pub fn reference_point(divergence: &Tensor, examples: usize) -> Result<Tensor> {
    let mean = divergence
        .f_to_kind(Kind::Float)?
        .f_reshape([] as [i64; 0])?
        .try_mul_scalar(1.0 / examples.max(1) as f64)?;
    Ok(mean.f_relu()?)
}

fn sequences(batch: &Batch) -> Result<&Sequences> {
    batch
        .sequences
        .as_ref()
        .ok_or_else(|| Error::config("objective", "the batch has no sequences; lay its rows out in pairs"))
}
