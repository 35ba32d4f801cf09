//! YaRN (Peng et al., arXiv:2309.00071), as transformers computes it.
//!
//! Pair i of d/2 turns p·ωᵢ/2π times within p original positions; the pair that turns β times is
//!
//! ```text
//! c(β) = d·ln(p/(2π·β)) / (2·ln theta)
//! lo, hi = c(β_fast), c(β_slow), rounded down and up if `truncate`, within 0 and d − 1
//! r = clip((i − lo)/(hi − lo), 0, 1)
//! ω′ᵢ = ωᵢ·(r/s + 1 − r)
//! ```
//!
//! Pairs that turn often keep their frequency, those that turn seldom are divided by the factor s. Cosines and sines are multiplied by the
//! amplitude m, so scores by m²:
//!
//! ```text
//! m = attention_factor, or g(mscale)/g(mscale_all_dim) if both are given and not 0, or g(1)        g(a) = 1 + 0.1·a·ln s
//! ```

use std::f64::consts::TAU;

/// YaRN's numbers, as a file gives them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// s, from 1 on.
    pub factor: f64,
    /// `original_max_position_embeddings`: the longest row of the training.
    pub original_positions: f64,
    /// Turns from which a pair is unchanged; 32 if absent or 0.
    pub beta_fast: Option<f64>,
    /// Turns up to which a pair is divided by the factor; 1 if absent or 0.
    pub beta_slow: Option<f64>,
    /// The amplitude.
    pub attention_factor: Option<f64>,
    /// Of the amplitude's numerator.
    pub mscale: Option<f64>,
    /// Of the amplitude's denominator.
    pub mscale_all_dim: Option<f64>,
    /// Whether the bounds are whole numbers; true if absent.
    pub truncate: Option<bool>,
}

impl Yarn {
    /// Returns m.
    pub fn amplitude(&self) -> f64 {
        let magnitude =
            |scale: f64| if self.factor <= 1.0 { 1.0 } else { 1.0 + 0.1 * scale * self.factor.ln() };
        let given = |number: Option<f64>| number.filter(|&number| number != 0.0);
        self.attention_factor.unwrap_or_else(|| match (given(self.mscale), given(self.mscale_all_dim)) {
            (Some(one), Some(all)) => magnitude(one) / magnitude(all),
            _ => magnitude(1.0),
        })
    }

    /// Returns ω′/ω of a pair of heads of width `head`.
    pub(super) fn share(&self, theta: f64, head: i64, pair: i64) -> f64 {
        let width = head as f64;
        let (fast, slow) = self.betas();
        let bound = |turns: f64| width * (self.original_positions / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (bound(fast), bound(slow));
        if self.truncate.unwrap_or(true) {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(width - 1.0));
        if low == high {
            // As transformers, which avoids a division by 0.
            high += 0.001;
        }
        let ramp = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
        ramp / self.factor + (1.0 - ramp)
    }

    fn betas(&self) -> (f64, f64) {
        let or = |number: Option<f64>, default| number.filter(|&number| number != 0.0).unwrap_or(default);
        (or(self.beta_fast, 32.0), or(self.beta_slow, 1.0))
    }

    /// Returns what is wrong with the numbers beside the factor.
    pub(super) fn invalid(&self) -> Option<String> {
        let positive = |value: f64| value.is_finite() && value > 0.0;
        let (fast, slow) = self.betas();
        let (original, amplitude) = (self.original_positions, self.amplitude());
        if !(positive(original) && positive(fast) && positive(slow) && fast >= slow) {
            return Some(format!(
                "beta_fast is {fast}, beta_slow {slow}, and the original positions are {original}; expected numbers above 0, the second \
                 at most the first"
            ));
        }
        if !(1e-3..=1e3).contains(&amplitude) {
            return Some(format!(
                "yarn multiplies cosines by {amplitude:?}; expected a factor from 0.001 to 1000 of `attention_factor` and `mscale`"
            ));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Frequencies, Scaling};
    use super::*;

    const PLAIN: Yarn = Yarn {
        factor: 8.0,
        original_positions: 64.0,
        beta_fast: None,
        beta_slow: None,
        attention_factor: None,
        mscale: None,
        mscale_all_dim: None,
        truncate: None,
    };

    /// `ROPE_INIT_FUNCTIONS["yarn"]` of transformers 5.23, theta 10 000, heads of 16, in fp32.
    #[test]
    fn frequencies_and_amplitude_are_those_of_transformers() {
        for (yarn, expected, amplitude) in [
            (
                PLAIN,
                [
                    1.0,
                    0.2239946573972702,
                    0.0416666641831398,
                    0.0039528473280370235,
                    0.0012499999720603228,
                    0.00039528473280370235,
                    0.0001250000059371814,
                    3.9528473280370235e-05,
                ],
                1.2079441541679836,
            ),
            (
                Yarn { truncate: Some(false), beta_fast: Some(4.0), ..PLAIN },
                [
                    1.0,
                    0.27299901843070984,
                    0.013662696816027164,
                    0.0039528473280370235,
                    0.0012499999720603228,
                    0.00039528473280370235,
                    0.0001250000059371814,
                    3.9528473280370235e-05,
                ],
                1.2079441541679836,
            ),
            (
                Yarn { attention_factor: Some(0.7), ..PLAIN },
                [
                    1.0,
                    0.2239946573972702,
                    0.0416666641831398,
                    0.0039528473280370235,
                    0.0012499999720603228,
                    0.00039528473280370235,
                    0.0001250000059371814,
                    3.9528473280370235e-05,
                ],
                0.7,
            ),
            (
                Yarn { mscale: Some(0.5), mscale_all_dim: Some(1.5), truncate: Some(false), ..PLAIN },
                [
                    1.0,
                    0.1789761483669281,
                    0.01319445762783289,
                    0.0039528473280370235,
                    0.0012499999720603228,
                    0.00039528473280370235,
                    0.0001250000059371814,
                    3.9528473280370235e-05,
                ],
                0.8414958598617686,
            ),
        ] {
            let frequencies = Frequencies { theta: 1e4, scaling: Scaling::Yarn(yarn) };
            for (angle, expected) in frequencies.angles(16).unwrap().into_iter().zip(expected) {
                assert!((angle / expected - 1.0).abs() < 1e-6, "{yarn:?}: {angle} for {expected}");
            }
            assert!((frequencies.amplitude() / amplitude - 1.0).abs() < 1e-12, "{yarn:?}");
        }
    }

    #[test]
    fn invalid_numbers_are_named() {
        let words = |yarn| {
            Frequencies { theta: 1e4, scaling: Scaling::Yarn(yarn) }.angles(16).unwrap_err().to_string()
        };
        for (yarn, expected) in [
            (
                Yarn { factor: 0.5, ..PLAIN },
                "the scaling's factor is 0.5; expected a finite number from 1 on",
            ),
            (
                Yarn { beta_fast: Some(0.5), ..PLAIN },
                "beta_fast is 0.5, beta_slow 1, and the original positions are 64;",
            ),
            (Yarn { attention_factor: Some(0.0), ..PLAIN }, "yarn multiplies cosines by 0.0;"),
        ] {
            assert!(words(yarn).contains(expected), "{}", words(yarn));
        }
    }
}
