//! The loss of a batch of answers, and its gradient through their log-probabilities.

use dataloading::Batch;
use models::module::{Context, Input, LanguageModel};
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use super::{Policy, PolicyConfig, PolicySums, Ratio};
use crate::accumulation::labelled_bound;
use crate::error::{Error, Result};

/// The largest ℓ̂ − ℓ whose term is computed: exp(20) is 5·10⁸.
const MOST_DIFFERENCE: f64 = 20.0;

/// What is known of the answers of a batch. Each is one sequence of the batch.
#[derive(Debug)]
pub(crate) struct Samples {
    /// `[sequences]`, fp32.
    pub(super) advantages: Tensor,
    /// The weight of each of its tokens, `[sequences]`, fp32.
    pub(super) weights: Tensor,
    /// The log-probability of each label when it was sampled, `[rows, length]`, fp32; `None` for that of the policy as it is.
    pub(super) old: Option<Tensor>,
    /// That by the reference, if the loss has its term.
    pub(super) reference: Option<Tensor>,
}

/// The log-probabilities of the tokens of a batch, one after the other, and what goes with them. All are `[tokens]`, fp32.
#[derive(Debug)]
pub(super) struct Tokens<'a> {
    /// ℓ.
    pub(super) own: &'a Tensor,
    /// ℓ when they were sampled.
    pub(super) old: Tensor,
    /// ℓ̂.
    pub(super) reference: Option<Tensor>,
    /// The number of each one's answer, int64; the number of answers for a token of none.
    pub(super) ids: Tensor,
}

impl Policy {
    /// Computes the sums of a batch of answers.
    ///
    /// # Errors
    /// A batch without sequences; errors of the model.
    pub(crate) fn forward(
        &self,
        model: &dyn LanguageModel,
        batch: &Batch,
        samples: &Samples,
    ) -> Result<PolicySums> {
        let sequences = batch
            .sequences
            .as_ref()
            .ok_or_else(|| Error::config("objective", "the batch has no sequences"))?;
        let own = self.log_probabilities(model, batch)?;
        let flat = |tensor: &Tensor| tensor.f_reshape([-1]);
        let old = match &samples.old {
            Some(old) => flat(old)?,
            None => own.f_detach()?,
        };
        let reference = samples.reference.as_ref().map(flat).transpose()?;
        let tokens = Tokens { own: &own, old, reference, ids: flat(&sequences.ids)? };
        sums(&self.config, &tokens, (&samples.advantages, &samples.weights), &sequences.lengths)
    }

    /// Returns the log-probability of each label at the temperature of sampling, `[rows · length]`, fp32; 0 without a label.
    ///
    /// # Errors
    /// Errors of the model.
    pub(super) fn log_probabilities(&self, model: &dyn LanguageModel, batch: &Batch) -> Result<Tensor> {
        let labelled_tokens = labelled_bound(batch.counts.targets, batch.tokens.numel());
        let context = Context { labelled_tokens, ..Context::default() };
        let input = Input { tokens: &batch.tokens, positions: None, context };
        let mut hidden = model.hidden(&input)?;
        if self.config.temperature != 1.0 {
            hidden = hidden.try_div_scalar(self.config.temperature)?;
        }
        let losses = model.head().token_losses(&hidden, &batch.labels, &input.context)?;
        Ok(losses.f_reshape([-1])?.f_neg()?)
    }
}

/// Computes the sums over tokens. `lengths` are those of the answers, fp32.
pub(super) fn sums(
    config: &PolicyConfig,
    tokens: &Tokens<'_>,
    (advantages, weights): (&Tensor, &Tensor),
    lengths: &Tensor,
) -> Result<PolicySums> {
    let Tokens { own, old, reference, ids } = tokens;
    let [low, high] = config.clip;
    // A token of no answer has 0.
    let of_tokens = |values: &Tensor| -> Result<Tensor> {
        Ok(Tensor::f_cat(&[values, &values.f_new_zeros([1], (values.kind(), values.device()))?], 0)?
            .f_index_select(0, ids)?)
    };
    let (advantages, weights) = (of_tokens(advantages)?, of_tokens(weights)?);
    let mut log_ratio = own.f_sub(old)?;
    if config.ratio == Ratio::Sequence {
        let numbers =
            Tensor::try_arange(lengths.numel() as i64, (Kind::Int64, ids.device()))?.f_unsqueeze(1)?;
        // A sum over all positions for each answer, whose order does not depend on threads.
        let is_own = ids.f_unsqueeze(0)?.f_eq_tensor(&numbers)?;
        let zero = log_ratio.f_new_zeros([], (log_ratio.kind(), log_ratio.device()))?;
        let sums = log_ratio.f_unsqueeze(0)?.f_where_self(&is_own, &zero)?;
        let sums = sums.f_sum_dim_intlist([1].as_slice(), false, Kind::Float)?;
        log_ratio = of_tokens(&sums.f_div(&lengths.try_clamp_min(1.0)?)?)?;
    }
    let ratio = log_ratio.f_exp()?;
    let bounded = ratio.try_clamp(1.0 - low, 1.0 + high)?;
    let gain = ratio.f_mul(&advantages)?.f_minimum(&bounded.f_mul(&advantages)?)?;
    let mut losses = gain.f_neg()?;
    let is_counted = weights.try_ne(0.0)?;
    let no_grad = |tensor: &Tensor| -> Result<Tensor> {
        Ok(tensor.f_detach()?.f_mul(&is_counted.f_to_kind(Kind::Float)?)?.f_sum(Kind::Float)?)
    };
    let detached = ratio.f_detach()?;
    let too_low = detached.try_lt(1.0 - low)?.f_logical_and(&advantages.try_lt(0.0)?)?;
    let is_positive = advantages.try_le(0.0)?.f_logical_not()?;
    let too_high = detached.try_le(1.0 + high)?.f_logical_not()?.f_logical_and(&is_positive)?;
    let clipped = no_grad(&too_low.f_logical_or(&too_high)?.f_to_kind(Kind::Float)?)?;
    let mut divergence = clipped.f_zeros_like()?;
    if let Some(reference) = reference {
        let difference = reference.f_sub(own)?.try_clamp_max(MOST_DIFFERENCE)?;
        let terms = difference.f_expm1()?.f_sub(&difference)?;
        let terms = ratio.f_mul(&terms)?;
        divergence = no_grad(&terms)?;
        losses = losses.f_add(&terms.try_mul_scalar(config.kl)?)?;
    }
    // A token of no answer may have any value, and none in the sum.
    let zero = losses.f_new_zeros([], (losses.kind(), losses.device()))?;
    let loss = losses.f_where_self(&is_counted, &zero)?.f_mul(&weights)?.f_sum(Kind::Float)?;
    Ok(PolicySums { loss, figures: Tensor::f_stack(&[divergence, clipped], 0)? })
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::policy::advantages::advantages;
    use crate::policy::{Aggregate, Scale};

    /// A fixture of `data/fixtures/policy/make_losses.py`: TRL's losses of given log-probabilities.
    #[derive(Deserialize)]
    struct Fixture {
        samples: usize,
        max_new_tokens: usize,
        clip: [f64; 2],
        rewards: Vec<f64>,
        own: Vec<Vec<f32>>,
        old: Vec<Vec<f32>>,
        reference: Vec<Vec<f32>>,
        cases: Vec<Case>,
    }

    #[derive(Deserialize)]
    struct Case {
        ratio: String,
        aggregate: String,
        scale: String,
        kl: f64,
        advantages: Vec<f64>,
        loss: f64,
        gradients: Vec<Vec<f64>>,
        mean_kl: f64,
        clipped: f64,
    }

    #[test]
    fn losses_are_those_of_trl() {
        let text = include_str!("../../../../data/fixtures/policy/losses.json");
        let fixture: Fixture = serde_json::from_str(text).unwrap();
        assert_eq!(fixture.cases.len(), 36);
        // One after the other, with a position of no answer before each.
        let lengths: Vec<usize> = fixture.own.iter().map(Vec::len).collect();
        let flat = |rows: &[Vec<f32>]| {
            let all: Vec<f32> =
                rows.iter().flat_map(|row| std::iter::once(-50.0).chain(row.iter().copied())).collect();
            Tensor::from_slice(&all)
        };
        let rows = lengths.len() as i64;
        let ids = (0..rows)
            .zip(&lengths)
            .flat_map(|(id, length)| std::iter::once(rows).chain(std::iter::repeat_n(id, *length)));
        let ids = Tensor::from_slice(&ids.collect::<Vec<i64>>());
        let tokens: usize = lengths.iter().sum();
        for case in &fixture.cases {
            let ratio = if case.ratio == "token" { Ratio::Token } else { Ratio::Sequence };
            let (aggregate, denominator) = match &*case.aggregate {
                "grpo" => (Aggregate::Grpo, lengths.len()),
                "dapo" => (Aggregate::Dapo, tokens),
                "dr_grpo" => (Aggregate::DrGrpo, lengths.len() * fixture.max_new_tokens),
                other => panic!("{other}"),
            };
            let scale = match &*case.scale {
                "group" => Scale::Group,
                "batch" => Scale::Batch,
                "none" => Scale::None,
                other => panic!("{other}"),
            };
            let name = format!("{ratio:?} {aggregate:?} {scale:?} {}", case.kl);
            let advantages = advantages(&fixture.rewards, fixture.samples, scale);
            for (own, expected) in advantages.iter().zip(&case.advantages) {
                assert!((own - expected).abs() < 1e-12, "{name}: {advantages:?}");
            }
            let config = PolicyConfig {
                samples: fixture.samples,
                rows: 8,
                at_once: 8,
                max_new_tokens: fixture.max_new_tokens,
                temperature: 1.0,
                end_tokens: Vec::new(),
                clip: fixture.clip,
                kl: case.kl,
                ratio,
                aggregate,
                scale,
                updates: 1,
                mask_truncated: false,
                seed: 0,
            };
            let own = flat(&fixture.own).set_requires_grad(true);
            let given = Tokens {
                own: &own,
                old: flat(&fixture.old),
                reference: (case.kl > 0.0).then(|| flat(&fixture.reference)),
                ids: ids.shallow_clone(),
            };
            let weight =
                |length: &usize| if aggregate == Aggregate::Grpo { 1.0 / *length as f32 } else { 1.0 };
            let weights = Tensor::from_slice(&lengths.iter().map(weight).collect::<Vec<f32>>());
            let advantages = advantages.iter().map(|advantage| *advantage as f32).collect::<Vec<f32>>();
            let of_rows =
                Tensor::from_slice(&lengths.iter().map(|length| *length as f32).collect::<Vec<f32>>());
            let sums = sums(&config, &given, (&Tensor::from_slice(&advantages), &weights), &of_rows).unwrap();
            let loss = &sums.loss / denominator as f64;
            runtime::autograd::backward(&[&loss]).unwrap();
            let close = |own: f64, expected: f64| (own - expected).abs() <= 1e-5 * expected.abs().max(1.0);
            assert!(
                close(loss.double_value(&[]), case.loss),
                "{name}: {} {}",
                loss.double_value(&[]),
                case.loss
            );
            let figures =
                Vec::<f64>::try_from(&(&sums.figures.to_kind(Kind::Double) / tokens as f64)).unwrap();
            assert!(close(figures[0], case.mean_kl), "{name}: {figures:?}");
            // TRL counts answers, and not their tokens, where they have one ratio.
            assert!(ratio == Ratio::Sequence || close(figures[1], case.clipped), "{name}: {figures:?}");
            let gradients = Vec::<f64>::try_from(own.grad().to_kind(Kind::Double)).unwrap();
            let expected: Vec<f64> = case
                .gradients
                .iter()
                .flat_map(|row| std::iter::once(0.0).chain(row.iter().copied()))
                .collect();
            for (own, expected) in gradients.iter().zip(&expected) {
                assert!((own - expected).abs() < 1e-6, "{name}: {gradients:?} {expected:?}");
            }
        }
    }
}
