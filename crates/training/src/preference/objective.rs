//! The objectives, as functions of log-probabilities.

use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::masked_rows::Grouping;

/// What is learned from preferences. See the [module](super) for the formulas.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Objective {
    /// Direct preference optimization.
    Dpo {
        /// β, above 0.
        beta: f64,
        /// ε in [0, 0.5): the probability that a pair is labelled the wrong way round.
        label_smoothing: f64,
    },
    /// Identity preference optimization.
    Ipo {
        /// β, above 0.
        beta: f64,
    },
    /// Simple preference optimization, without a reference.
    SimPo {
        /// β, above 0.
        beta: f64,
        /// γ, at least 0: the margin.
        gamma: f64,
    },
    /// Contrastive preference optimization, without a reference.
    Cpo {
        /// β, above 0.
        beta: f64,
        /// α, at least 0: the factor of the loss of chosen completions.
        alpha: f64,
    },
    /// Odds-ratio preference optimization, without a reference.
    Orpo {
        /// λ, above 0. TRL's name for it is β.
        lambda: f64,
    },
    /// Kahneman–Tversky optimization, of answers rated one by one.
    Kto {
        /// β, above 0.
        beta: f64,
        /// λ_D, at least 0: the weight of desirable answers.
        desirable_weight: f64,
        /// λ_U, at least 0: the weight of undesirable answers.
        undesirable_weight: f64,
    },
}

/// The log-probabilities of completions: two for each pair, the chosen one first; one for each example that is rated.
#[derive(Debug, Clone, Copy)]
pub struct LogProbabilities<'a> {
    /// S `[sequences]`, fp32.
    pub sums: &'a Tensor,
    /// n `[sequences]`, fp32.
    pub lengths: &'a Tensor,
    /// Ŝ `[sequences]`, fp32; `None` for an objective without a reference.
    pub reference: Option<&'a Tensor>,
    /// Of [`Objective::Kto`].
    pub ratings: Option<Rated<'a>>,
}

/// Which completions are desirable, and the point that tells gains from losses.
#[derive(Debug, Clone, Copy)]
pub struct Rated<'a> {
    /// `[sequences]`, fp32: 1 for a desirable one, −1 for an undesirable one.
    pub signs: &'a Tensor,
    /// z₀, fp32, a scalar without a graph.
    pub reference_point: &'a Tensor,
}

/// The largest mean log-probability whose odds are computed: 1 − eᵃ would be 0 at 0.
const MOST_LOG_PROBABILITY: f64 = -1e-6;

impl Objective {
    /// Checks the options.
    ///
    /// # Errors
    /// One outside its range.
    pub fn check(&self) -> Result<()> {
        let positive = |name: &str, value: f64| match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => Err(Error::config("objective", format!("{name} is {value}; expected a number above 0"))),
        };
        let not_negative = |name: &str, value: f64| match value.is_finite() && value >= 0.0 {
            true => Ok(()),
            false => Err(Error::config("objective", format!("{name} is {value}; expected 0 or more"))),
        };
        match *self {
            Self::Dpo { beta, label_smoothing } => {
                if !(0.0..0.5).contains(&label_smoothing) {
                    let reason =
                        format!("label_smoothing is {label_smoothing}; expected at least 0, below 0.5");
                    return Err(Error::config("objective", reason));
                }
                positive("beta", beta)
            }
            Self::Ipo { beta } => positive("beta", beta),
            Self::SimPo { beta, gamma } => positive("beta", beta).and(not_negative("gamma", gamma)),
            Self::Cpo { beta, alpha } => positive("beta", beta).and(not_negative("alpha", alpha)),
            Self::Orpo { lambda } => positive("beta", lambda),
            Self::Kto { beta, desirable_weight, undesirable_weight } => positive("beta", beta)
                .and(not_negative("desirable_weight", desirable_weight))
                .and(not_negative("undesirable_weight", undesirable_weight)),
        }
    }

    /// Whether it compares with a reference model.
    pub fn has_reference(&self) -> bool {
        matches!(self, Self::Dpo { .. } | Self::Ipo { .. } | Self::Kto { .. })
    }

    /// Whether it learns from rated answers, and not from pairs.
    pub fn is_rated(&self) -> bool {
        matches!(self, Self::Kto { .. })
    }

    /// The factor of the mean loss of chosen tokens; 0 without one.
    pub fn chosen_loss(&self) -> f64 {
        match *self {
            Self::Cpo { alpha, .. } => alpha,
            Self::Orpo { .. } => 1.0,
            Self::Dpo { .. } | Self::Ipo { .. } | Self::SimPo { .. } | Self::Kto { .. } => 0.0,
        }
    }

    /// The rows of batches for it.
    pub fn grouping(&self) -> Grouping {
        match self {
            Self::Kto { .. } => Grouping::Rated,
            Self::Orpo { .. } => Grouping::Pairs { learn_prompts: true },
            Self::Dpo { .. } | Self::Ipo { .. } | Self::SimPo { .. } | Self::Cpo { .. } => {
                Grouping::Pairs { learn_prompts: false }
            }
        }
    }

    /// Returns the losses of examples, `[pairs]` or `[sequences]`, without that of chosen tokens.
    ///
    /// # Errors
    /// Log-probabilities without those of a reference, or ratings, that it needs; errors of libtorch.
    pub fn losses(&self, given: &LogProbabilities<'_>) -> Result<Tensor> {
        let softplus = |x: &Tensor, factor: f64| Ok::<_, Error>(x.try_mul_scalar(factor)?.f_softplus()?);
        match *self {
            Self::Dpo { beta, label_smoothing } => {
                let margin = difference(&given.against_reference()?)?;
                let losses = softplus(&margin, -beta)?;
                if label_smoothing == 0.0 {
                    return Ok(losses);
                }
                let wrong = softplus(&margin, beta)?.try_mul_scalar(label_smoothing)?;
                Ok(losses.try_mul_scalar(1.0 - label_smoothing)?.f_add(&wrong)?)
            }
            Self::Ipo { beta } => {
                let margin = difference(&given.against_reference()?.f_div(given.lengths)?)?;
                Ok(margin.try_sub_scalar(0.5 / beta)?.f_square()?)
            }
            Self::SimPo { beta, gamma } => {
                let margin = difference(&given.means()?)?.try_mul_scalar(-beta)?;
                Ok(margin.try_add_scalar(gamma)?.f_softplus()?)
            }
            Self::Cpo { beta, .. } => softplus(&difference(given.sums)?, -beta),
            Self::Orpo { lambda } => {
                let means = given.means()?.try_clamp_max(MOST_LOG_PROBABILITY)?;
                let odds = means.f_sub(&log_of_complement(&means)?)?;
                Ok(softplus(&difference(&odds)?, -1.0)?.try_mul_scalar(lambda)?)
            }
            Self::Kto { beta, desirable_weight: desirable, undesirable_weight: undesirable } => {
                let Rated { signs, reference_point } = given.rated()?;
                let gains = given.against_reference()?.f_sub(reference_point)?.f_mul(signs)?;
                let losses = gains.try_mul_scalar(-beta)?.f_sigmoid()?;
                let weights = signs.try_mul_scalar(0.5 * (desirable - undesirable))?;
                Ok(losses.f_mul(&weights.try_add_scalar(0.5 * (desirable + undesirable))?)?)
            }
        }
    }

    /// Returns the number of examples that are right, int64, a scalar: pairs whose chosen completion has the higher reward; desirable
    /// completions whose reward is above β·z₀, and undesirable ones below it. And the sums of the rewards of chosen or desirable, and of
    /// rejected or undesirable ones, `[2]`.
    ///
    /// # Errors
    /// As [`Objective::losses`].
    pub fn correct_and_rewards(&self, given: &LogProbabilities<'_>) -> Result<[Tensor; 2]> {
        let _no_grad = tch::no_grad_guard();
        let rewards = self.rewards(given)?;
        let (correct, chosen, rejected) = if self.is_rated() {
            let Rated { signs, reference_point } = given.rated()?;
            let gains = given.against_reference()?.f_sub(reference_point)?.f_mul(signs)?;
            let is_desirable = signs.try_ge(0.0)?;
            let of = |is_counted: &Tensor| rewards.f_mul(&is_counted.f_to_kind(rewards.kind())?);
            let is_undesirable = is_desirable.f_logical_not()?;
            (gains.try_lt(0.0)?.f_logical_not()?, of(&is_desirable)?, of(&is_undesirable)?)
        } else {
            let (chosen, rejected) = (of_chosen(&rewards)?, of_rejected(&rewards)?);
            (chosen.f_gt_tensor(&rejected)?, chosen, rejected)
        };
        let sums = [chosen.f_sum(Kind::Float)?, rejected.f_sum(Kind::Float)?];
        Ok([correct.f_sum(Kind::Int64)?, Tensor::f_stack(&sums, 0)?])
    }

    /// Returns the rewards of completions `[sequences]`, without a graph.
    ///
    /// # Errors
    /// As [`Objective::losses`].
    pub fn rewards(&self, given: &LogProbabilities<'_>) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let (values, beta) = match *self {
            Self::Dpo { beta, .. } | Self::Ipo { beta } | Self::Kto { beta, .. } => {
                (given.against_reference()?, beta)
            }
            Self::SimPo { beta, .. } | Self::Orpo { lambda: beta } => (given.means()?, beta),
            Self::Cpo { beta, .. } => (given.sums.shallow_clone(), beta),
        };
        Ok(values.f_detach()?.try_mul_scalar(beta)?)
    }
}

impl LogProbabilities<'_> {
    /// s.
    fn against_reference(&self) -> Result<Tensor> {
        let reference = self.reference.ok_or_else(|| {
            Error::config(
                "objective",
                "it compares with a reference model, and the batch has no log-probabilities of one",
            )
        })?;
        Ok(self.sums.f_sub(reference)?)
    }

    fn rated(&self) -> Result<Rated<'_>> {
        self.ratings.ok_or_else(|| {
            Error::config("objective", "it learns from rated answers, and the batch has no ratings")
        })
    }

    /// a.
    fn means(&self) -> Result<Tensor> {
        Ok(self.sums.f_div(self.lengths)?)
    }
}

/// Returns the values of the chosen minus those of the rejected completions.
fn difference(values: &Tensor) -> Result<Tensor> {
    Ok(of_chosen(values)?.f_sub(&of_rejected(values)?)?)
}

pub(super) fn of_chosen(values: &Tensor) -> Result<Tensor> {
    Ok(values.f_slice(0, 0, None, 2)?)
}

fn of_rejected(values: &Tensor) -> Result<Tensor> {
    Ok(values.f_slice(0, 1, None, 2)?)
}

/// Returns ln(1 − eᵃ) of a < 0, exact on both sides of −ln 2 (Mächler, "Accurately computing log(1 − exp(−|a|))").
fn log_of_complement(means: &Tensor) -> Result<Tensor> {
    let is_near = means.try_ge(-std::f64::consts::LN_2)?;
    let middle = Tensor::try_full([] as [i64; 0], -std::f64::consts::LN_2, (means.kind(), means.device()))?;
    // The branch that is not taken gets a value whose gradient is finite.
    let near = means.f_where_self(&is_near, &middle)?.f_expm1()?.f_neg()?.f_log()?;
    let far = middle.f_where_self(&is_near, means)?.f_exp()?.f_neg()?.f_log1p()?;
    Ok(near.f_where_self(&is_near, &far)?)
}
