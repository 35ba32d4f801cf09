//! How fast each pair of columns turns.

use std::f64::consts::TAU;

use crate::error::{Error, Result};

use super::NAME;

/// The angles by which each pair turns from one place to the next.
///
/// Pair i of a head of width e turns by ωᵢ = theta^(−2i/e), which `scaling` may slow down.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Frequencies {
    /// `rope_theta`: 10 000 in the paper and Llama 2, 500 000 in Llama 3, 1 000 000 in Qwen2.
    pub theta: f64,
    /// How a model that was trained on short rows is made to read longer ones.
    pub scaling: Scaling,
}

impl Default for Frequencies {
    /// The paper's: theta 10 000, nothing scaled.
    fn default() -> Self {
        Self { theta: 10_000.0, scaling: Scaling::None }
    }
}

/// Slower turns, so that places beyond those of the training meet angles that it has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Scaling {
    /// As trained.
    #[default]
    None,
    /// Every ω divided by `factor` (Chen et al., arXiv:2306.15595): place p is read as place p/factor.
    Linear {
        /// From 1 on.
        factor: f64,
    },
    /// Llama 3.1's. Pairs that turn more than `high_freq_factor` times within `original_places` stay as they are, those that
    /// turn less than `low_freq_factor` times are slowed by `factor`, and between the two the share of both is linear in the
    /// number of turns.
    Llama3 {
        /// From 1 on.
        factor: f64,
        /// Turns below which a pair is slowed.
        low_freq_factor: f64,
        /// Turns above which it is not; above `low_freq_factor`.
        high_freq_factor: f64,
        /// `original_max_position_embeddings`: the longest row of the training.
        original_places: f64,
    },
}

impl Frequencies {
    /// ωᵢ of the `head / 2` pairs, in radians per place.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an odd width or one below 2, and for numbers that make no angles: each is named.
    pub fn angles(&self, head: i64) -> Result<Vec<f64>> {
        let invalid = |reason: String| Err(Error::invalid(NAME, reason));
        if head < 2 || head % 2 != 0 {
            return invalid(format!("heads of width {head}; expected an even width from 2 on"));
        }
        let positive = |value: f64| value.is_finite() && value > 0.0;
        if !positive(self.theta) {
            return invalid(format!("theta is {}; expected a finite number above 0", self.theta));
        }
        if let Scaling::Linear { factor } | Scaling::Llama3 { factor, .. } = self.scaling
            && !(factor.is_finite() && factor >= 1.0)
        {
            return invalid(format!("the scaling's factor is {factor}; expected a finite number from 1 on"));
        }
        if let Scaling::Llama3 { low_freq_factor, high_freq_factor, original_places, .. } = self.scaling
            && !(positive(low_freq_factor)
                && positive(high_freq_factor)
                && low_freq_factor < high_freq_factor
                && positive(original_places))
        {
            return invalid(format!(
                "low_freq_factor is {low_freq_factor}, high_freq_factor {high_freq_factor}, and the original places are \
                 {original_places}; expected numbers above 0, the first below the second"
            ));
        }
        let unscaled = (0..head / 2).map(|pair| self.theta.powf(-2.0 * pair as f64 / head as f64));
        Ok(unscaled.map(|angle| self.scaling.of(angle)).collect())
    }
}

impl Scaling {
    fn of(self, angle: f64) -> f64 {
        match self {
            Self::None => angle,
            Self::Linear { factor } => angle / factor,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_places } => {
                let turns = original_places * angle / TAU;
                let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let kept = kept.clamp(0.0, 1.0);
                (1.0 - kept) * angle / factor + kept * angle
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published formula for Llama 3.2's configuration with heads of 16, worked out apart in f64.
    #[test]
    fn llama_3_scales_as_published() {
        let scaling = Scaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_places: 8192.0,
        };
        let frequencies = Frequencies { theta: 500_000.0, scaling };
        let found = frequencies.angles(16).unwrap();
        let plain = Frequencies { scaling: Scaling::None, ..frequencies }.angles(16).unwrap();
        assert_eq!(found[..4], plain[..4], "up to pair 3 a pair turns more than 4 times");
        let middle = 0.000_429_556_796_559_368_15;
        assert!((found[4] / middle - 1.0).abs() < 1e-12, "{}", found[4]);
        for pair in 5..8 {
            assert!((found[pair] / (plain[pair] / 32.0) - 1.0).abs() < 1e-12, "{pair}");
        }
        let linear = Frequencies { scaling: Scaling::Linear { factor: 4.0 }, ..frequencies };
        assert_eq!(linear.angles(16).unwrap()[3], plain[3] / 4.0);
    }

    #[test]
    fn what_makes_no_angles_is_named() {
        let words =
            |theta, scaling, head| Frequencies { theta, scaling }.angles(head).unwrap_err().to_string();
        let llama = |low_freq_factor, high_freq_factor| Scaling::Llama3 {
            factor: 8.0,
            low_freq_factor,
            high_freq_factor,
            original_places: 8192.0,
        };
        for (found, expected) in [
            (
                words(1e4, Scaling::None, 7),
                "rotary embedding: heads of width 7; expected an even width from 2 on",
            ),
            (
                words(1e4, Scaling::None, 0),
                "rotary embedding: heads of width 0; expected an even width from 2 on",
            ),
            (words(0.0, Scaling::None, 8), "rotary embedding: theta is 0; expected a finite number above 0"),
            (
                words(f64::NAN, Scaling::None, 8),
                "rotary embedding: theta is NaN; expected a finite number above 0",
            ),
            (
                words(1e4, Scaling::Linear { factor: 0.5 }, 8),
                "rotary embedding: the scaling's factor is 0.5; expected a finite number from 1 on",
            ),
            (
                words(1e4, llama(4.0, 4.0), 8),
                "rotary embedding: low_freq_factor is 4, high_freq_factor 4, and the original places are 8192; expected \
                 numbers above 0, the first below the second",
            ),
        ] {
            assert_eq!(found, expected);
        }
    }
}
