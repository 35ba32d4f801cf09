//! Frequencies of the rotary position embedding (Su et al., arXiv:2104.09864).

use std::f64::consts::TAU;

mod yarn;

pub use yarn::Yarn;

use crate::error::{Error, Result};

/// The angles by which each pair rotates from one position to the next.
///
/// Pair i of a head of width e rotates by ωᵢ = theta^(−2i/e), which `scaling` may reduce.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Frequencies {
    /// `rope_theta`: 10 000 in the paper and Llama 2, 500 000 in Llama 3, 1 000 000 in Qwen2.
    pub theta: f64,
    /// Scaling for rows longer than those of the training.
    pub scaling: Scaling,
}

impl Default for Frequencies {
    /// Returns the paper's: theta 10 000, no scaling.
    fn default() -> Self {
        Self { theta: 10_000.0, scaling: Scaling::None }
    }
}

/// Lower frequencies, so that positions beyond those of the training have angles that occurred in it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Scaling {
    /// No scaling.
    #[default]
    None,
    /// Every ω divided by `factor` (Chen et al., arXiv:2306.15595): position p is treated as position p/factor.
    Linear {
        /// From 1 on.
        factor: f64,
    },
    /// Llama 3.1's. Pairs that rotate more than `high_freq_factor` times within `original_positions` are unchanged, those that
    /// rotate less than `low_freq_factor` times are divided by `factor`, and in between the two are interpolated linearly in the
    /// number of turns.
    Llama3 {
        /// From 1 on.
        factor: f64,
        /// Turns below which a pair is divided by `factor`.
        low_freq_factor: f64,
        /// Turns above which a pair is unchanged; greater than `low_freq_factor`.
        high_freq_factor: f64,
        /// `original_max_position_embeddings`: the longest row of the training.
        original_positions: f64,
    },
    /// YaRN.
    Yarn(Yarn),
    /// Gemma 4's: the first `share` of the pairs rotate, by ωᵢ of the whole head divided by `factor`, and the others do not.
    Proportional {
        /// `partial_rotary_factor`, from 0 to 1.
        share: f64,
        /// From 1 on.
        factor: f64,
    },
    /// A larger theta for rows beyond the model's positions. Rows end there, so no frequency changes.
    Dynamic {
        /// From 1 on.
        factor: f64,
    },
}

impl Frequencies {
    /// Returns ωᵢ of the `head / 2` pairs, in radians per position.
    ///
    /// # Errors
    /// [`Error::Config`] for an odd width or one below 2, and for invalid numbers, which it names.
    pub fn angles(&self, head: i64) -> Result<Vec<f64>> {
        let invalid = |reason: String| Err(Error::Config { what: "rotary embedding", reason });
        if head < 2 || head % 2 != 0 {
            return invalid(format!("heads of width {head}; expected an even width from 2 on"));
        }
        let positive = |value: f64| value.is_finite() && value > 0.0;
        if !positive(self.theta) {
            return invalid(format!("theta is {}; expected a finite number above 0", self.theta));
        }
        if let Scaling::Linear { factor }
        | Scaling::Llama3 { factor, .. }
        | Scaling::Dynamic { factor }
        | Scaling::Proportional { factor, .. }
        | Scaling::Yarn(Yarn { factor, .. }) = self.scaling
            && !(factor.is_finite() && factor >= 1.0)
        {
            return invalid(format!("the scaling's factor is {factor}; expected a finite number from 1 on"));
        }
        if let Scaling::Llama3 { low_freq_factor, high_freq_factor, original_positions, .. } = self.scaling
            && !(positive(low_freq_factor)
                && positive(high_freq_factor)
                && low_freq_factor < high_freq_factor
                && positive(original_positions))
        {
            return invalid(format!(
                "low_freq_factor is {low_freq_factor}, high_freq_factor {high_freq_factor}, and the original positions are \
                 {original_positions}; expected numbers above 0, the first below the second"
            ));
        }
        if let Scaling::Proportional { share, .. } = self.scaling
            && !(0.0..=1.0).contains(&share)
        {
            return invalid(format!(
                "a share of {share} of each head rotates; expected a number from 0 to 1"
            ));
        }
        if let Scaling::Yarn(yarn) = &self.scaling
            && let Some(reason) = yarn.invalid()
        {
            return invalid(reason);
        }
        Ok(self.scaled(head).collect())
    }

    /// Returns the factor of cosines and sines, and so of rotated heads: 1 for every scaling but YaRN.
    pub fn amplitude(&self) -> f64 {
        if let Scaling::Yarn(yarn) = &self.scaling { yarn.amplitude() } else { 1.0 }
    }

    fn scaled(&self, head: i64) -> impl Iterator<Item = f64> {
        let Self { theta, scaling } = *self;
        self.unscaled(head).zip(0..).map(move |(angle, pair)| match scaling {
            Scaling::Yarn(yarn) => angle * yarn.share(theta, head, pair),
            Scaling::Proportional { share, factor } => {
                if pair < (share * head as f64 / 2.0) as i64 {
                    angle / factor
                } else {
                    0.0
                }
            }
            other => other.apply(angle),
        })
    }

    /// Returns the numbers by which the scaling divides theta^(−2i/head), for the `head / 2` pairs; infinity for one that does not rotate.
    pub fn divisors(&self, head: i64) -> impl Iterator<Item = f64> {
        self.unscaled(head).zip(self.scaled(head)).map(|(angle, scaled)| angle / scaled)
    }

    fn unscaled(&self, head: i64) -> impl Iterator<Item = f64> {
        let theta = self.theta;
        (0..head / 2).map(move |pair| theta.powf(-2.0 * pair as f64 / head as f64))
    }
}

impl Scaling {
    fn apply(self, angle: f64) -> f64 {
        match self {
            // Scaled by pair, not by angle: see `Frequencies::scaled`.
            Self::None | Self::Dynamic { .. } | Self::Yarn(_) | Self::Proportional { .. } => angle,
            Self::Linear { factor } => angle / factor,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                let turns = original_positions * angle / TAU;
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

    /// The published formula for Llama 3.2's configuration with heads of 16, computed separately in f64.
    #[test]
    fn llama_3_scales_as_published() {
        let scaling = Scaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 8192.0,
        };
        let frequencies = Frequencies { theta: 500_000.0, scaling };
        let scaled = frequencies.angles(16).unwrap();
        let plain = Frequencies { scaling: Scaling::None, ..frequencies }.angles(16).unwrap();
        assert_eq!(scaled[..4], plain[..4], "up to pair 3 a pair turns more than 4 times");
        let middle = 0.000_429_556_796_559_368_15;
        assert!((scaled[4] / middle - 1.0).abs() < 1e-12, "{}", scaled[4]);
        for pair in 5..8 {
            assert!((scaled[pair] / (plain[pair] / 32.0) - 1.0).abs() < 1e-12, "{pair}");
        }
        let linear = Frequencies { scaling: Scaling::Linear { factor: 4.0 }, ..frequencies };
        assert_eq!(linear.angles(16).unwrap()[3], plain[3] / 4.0);
    }

    #[test]
    fn invalid_frequencies_are_named() {
        let words =
            |theta, scaling, head| Frequencies { theta, scaling }.angles(head).unwrap_err().to_string();
        let llama = |low_freq_factor, high_freq_factor| Scaling::Llama3 {
            factor: 8.0,
            low_freq_factor,
            high_freq_factor,
            original_positions: 8192.0,
        };
        for (message, expected) in [
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
                "rotary embedding: low_freq_factor is 4, high_freq_factor 4, and the original positions are 8192; expected \
                 numbers above 0, the first below the second",
            ),
        ] {
            assert_eq!(message, expected);
        }
    }
}
