//! Choosing the next token from logits.

use runtime::ops::TryScalar;
use runtime::random::Generator as Random;
use tch::{Device, Kind, Tensor};

use super::WHAT;
use super::batch::Row;
use crate::error::{Error, Result};

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Sampling {
    /// The token with the largest logit; of several, the first.
    #[default]
    Greedy,
    /// A sample from softmax(logits / temperature), restricted to the `top_k` most probable tokens, then to the smallest set of
    /// those with probability `top_p` (Holtzman et al., arXiv:1904.09751).
    Random {
        /// Above 0; 1 is the model's own distribution.
        temperature: f64,
        /// Number of tokens to keep; `None` for all.
        top_k: Option<usize>,
        /// In (0, 1]; 1 for all.
        top_p: f64,
        /// Equal seeds give equal tokens. Each row has its own sequence, by its number.
        seed: u64,
    },
}

impl Sampling {
    pub(super) fn check(&self) -> Result<()> {
        let &Self::Random { temperature, top_k, top_p, .. } = self else { return Ok(()) };
        let refuse = |reason: String| Err(Error::invalid(WHAT, reason));
        if !(temperature.is_finite() && temperature > 0.0) {
            return refuse(format!(
                "`temperature` is {temperature}; expected above 0 (use greedy for the most probable token)"
            ));
        }
        if top_k == Some(0) {
            return refuse("`top_k` is 0; expected at least 1, or none for all tokens".to_owned());
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return refuse(format!("`top_p` is {top_p}; expected a probability in (0, 1]"));
        }
        Ok(())
    }

    /// Returns the generator of row `number`.
    pub(super) fn random(&self, number: usize) -> Result<Option<Random>> {
        match self {
            Self::Greedy => Ok(None),
            // Neighbouring rows of neighbouring seeds must differ: an odd multiple spreads the seeds.
            Self::Random { seed, .. } => {
                let of_row = (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                Ok(Some(Random::new(seed.wrapping_add(of_row))?))
            }
        }
    }

    /// Chooses a token for each row of `logits_bv`, `[rows, vocabulary]`. `broken_weight` finds the weight behind logits that are not
    /// finite.
    pub(super) fn sample(
        &self,
        logits_bv: &Tensor,
        rows: &mut [Row],
        broken_weight: impl FnOnce() -> Option<String>,
    ) -> Result<Vec<i64>> {
        let (best, tokens) = logits_bv.f_max_dim(-1, false)?;
        let best = Vec::<f64>::try_from(best.f_to_kind(Kind::Double)?)?;
        if let Some(row) = best.iter().position(|best| !best.is_finite()) {
            let reason = broken_weight().map_or_else(
                || "the dtype of the weights is too narrow for the model".to_owned(),
                |name| format!("`{name}` has an infinity or a NaN: the model's files are broken"),
            );
            let (prompt, logit) = (rows[row].number, best[row]);
            return Err(Error::invalid(
                WHAT,
                format!("prompt {prompt}: the largest logit is {logit}; {reason}"),
            ));
        }
        let &Self::Random { temperature, top_k, top_p, .. } = self else {
            return Ok(Vec::try_from(tokens)?);
        };
        let scaled = logits_bv.f_to_kind(Kind::Float)?.try_div_scalar(temperature)?;
        let probabilities = scaled.f_softmax(-1, Kind::Float)?;
        rows.iter_mut()
            .zip(0..)
            .map(|(row, index)| {
                let of_row = Vec::<f32>::try_from(probabilities.f_get(index)?)?;
                let drawn = match &mut row.random {
                    Some(random) => {
                        random.uniform(&[1], (0.0, 1.0), (Kind::Double, Device::Cpu))?.f_double_value(&[0])?
                    }
                    None => 0.0,
                };
                Ok(draw(of_row, top_k, top_p, drawn))
            })
            .collect()
    }
}

/// Returns the token at quantile `drawn` of the distribution that is left after both restrictions.
fn draw(probabilities: Vec<f32>, top_k: Option<usize>, top_p: f64, drawn: f64) -> i64 {
    let probability = |token: &usize| probabilities[*token];
    let by_probability = |a: &usize, b: &usize| probability(b).total_cmp(&probability(a)).then(a.cmp(b));
    let mut kept: Vec<usize> = (0..probabilities.len()).collect();
    if let Some(k) = top_k.filter(|&k| k < kept.len()) {
        kept.select_nth_unstable_by(k - 1, by_probability);
        kept.truncate(k);
    }
    let sum = |kept: &[usize]| kept.iter().map(|token| f64::from(probability(token))).sum::<f64>();
    if top_p < 1.0 {
        let all = sum(&kept);
        // Tokens below this probability sum to less than 1 − top_p, so the nucleus is among the others; only those are sorted.
        let least = (1.0 - top_p) * all / kept.len() as f64;
        kept.retain(|token| f64::from(probability(token)) >= least);
        kept.sort_unstable_by(by_probability);
        let mut reached = 0.0;
        let before = |token: &usize| {
            let is_before = reached < top_p * all;
            reached += f64::from(probability(token));
            is_before
        };
        kept = kept.into_iter().take_while(before).collect();
    } else {
        kept.sort_unstable();
    }
    let mut left = drawn * sum(&kept);
    let drawn_token = kept.iter().find(|token| {
        left -= f64::from(probability(token));
        left < 0.0
    });
    // Rounding may leave a remainder at the end.
    let last = kept.iter().rev().find(|token| probability(token) > 0.0);
    drawn_token.or(last).map_or(0, |&token| token as i64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::draw;

    /// The tokens that both cuts leave, by sorting all of them.
    fn kept(probabilities: &[f32], top_k: Option<usize>, top_p: f64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..probabilities.len()).collect();
        order.sort_by(|&a, &b| probabilities[b].total_cmp(&probabilities[a]).then(a.cmp(&b)));
        order.truncate(top_k.unwrap_or(order.len()));
        let all: f64 = order.iter().map(|&token| f64::from(probabilities[token])).sum();
        let mut sum = 0.0;
        let number = order.iter().take_while(|&&token| {
            let is_before = sum < top_p * all;
            sum += f64::from(probabilities[token]);
            is_before
        });
        let number = number.count();
        order.truncate(number);
        order
    }

    proptest! {
        /// Over a fine grid of draws each token of the rest has its share, and no other has any.
        #[test]
        fn sampling_matches_the_truncated_distribution(
            weights in proptest::collection::vec(1u32..1000, 1..12),
            top_k in proptest::option::of(1usize..14),
            top_p in prop_oneof![Just(1.0), 0.05..1.0],
        ) {
            let sum: f32 = weights.iter().map(|&w| w as f32).sum();
            let probabilities: Vec<f32> = weights.iter().map(|&w| w as f32 / sum).collect();
            let kept = kept(&probabilities, top_k, top_p);
            let mass: f64 = kept.iter().map(|&token| f64::from(probabilities[token])).sum();
            let grid = 2_000;
            let mut counts = vec![0; probabilities.len()];
            for step in 0..grid {
                let drawn = (f64::from(step) + 0.5) / f64::from(grid);
                counts[draw(probabilities.clone(), top_k, top_p, drawn) as usize] += 1;
            }
            for (token, count) in counts.into_iter().enumerate() {
                let share = if kept.contains(&token) { f64::from(probabilities[token]) / mass } else { 0.0 };
                let found = f64::from(count) / f64::from(grid);
                prop_assert!((found - share).abs() < 2.0 / f64::from(grid), "token {token}: {found} of {share}");
            }
        }
    }
}
