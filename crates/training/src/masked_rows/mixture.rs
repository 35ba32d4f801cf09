//! The order of rows of several sources by weight.
//!
//! With weights w_k, whose shares are λ_k = w_k / Σ w, the first t rows of an endless sequence have x_k(t) rows of source k. The order is
//! Tijdeman's ("The chairman assignment problem", 1980): of the K sources with λ_k·t − x_k(t − 1) ≥ 1/(2K − 2), row t is the source's
//! that has to come first, the one with the least (x_k(t − 1) + 1 − 1/(2K − 2)) / λ_k. Then |x_k(t) − λ_k·t| ≤ 1 − 1/(2K − 2) for every t: each
//! prefix has every source's share to within one row.
//!
//! Weights are decimals, so that the shares have a common denominator D, and the order repeats after D rows, each source with its exact share.
//! One period is held, 8 bytes a row, so that the source of any row, and which of the source's rows it is, take constant time.
//! (Interleaving by draws, as `datasets.interleave_datasets` does, is off by √t rows after t, and needs its generator's state to resume.)
//!
//! The rows of a source are those of its epochs, one after the other, each in an order of its own: row j is that of position j mod n in epoch
//! ⌊j/n⌋ of its n rows. So no source loses or repeats a row before it has given all.

use std::sync::Arc;

use crate::error::{Error, Result};

/// The longest period.
const LONGEST: u64 = 1 << 20;
/// The most digits behind the point of a weight.
const DIGITS: usize = 6;

/// The sources of the rows of an endless sequence. See the [module](self).
///
/// ```
/// use training::masked_rows::Mixture;
///
/// let mixture = Mixture::new(&[0.75, 0.25])?;
/// let sources: Vec<usize> = (0..8).map(|position| mixture.at(position).0).collect();
/// assert_eq!(sources, [0, 0, 1, 0, 0, 0, 1, 0]);
/// // The second row of the second source.
/// assert_eq!(mixture.at(6), (1, 1));
/// # Ok::<(), training::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mixture {
    /// Rows of each source in a period.
    counts: Vec<u32>,
    /// The source of each row of a period, and how many rows of it come before.
    period: Arc<[(u32, u32)]>,
}

impl Mixture {
    /// Creates the order of sources with these weights.
    ///
    /// # Errors
    /// No weights; a weight that is not above 0, or has more than 6 digits behind the point; weights whose order repeats after more than
    /// 2²⁰ rows only.
    pub fn new(weights: &[f64]) -> Result<Self> {
        let digits = weights.iter().map(|weight| decimals(*weight)).collect::<Result<Vec<_>>>()?;
        let most = digits.iter().copied().max().ok_or_else(|| refuse("no sources".to_owned()))?;
        let scale = 10_f64.powi(most as i32);
        let whole: Vec<u64> = weights.iter().map(|weight| (weight * scale).round() as u64).collect();
        let common = whole.iter().copied().fold(0, greatest_common_divisor);
        let counts: Vec<u64> = whole.iter().map(|weight| weight / common).collect();
        let length = counts.iter().fold(0, |sum: u64, count| sum.saturating_add(*count));
        if length > LONGEST {
            return Err(refuse(format!(
                "the weights {weights:?} have the shares of {length} rows, and {LONGEST} are possible; round them, such as to 3 digits"
            )));
        }
        let period = period(&counts, length);
        Ok(Self { counts: counts.into_iter().map(|count| count as u32).collect(), period: period.into() })
    }

    /// Returns the number of sources.
    pub fn sources(&self) -> usize {
        self.counts.len()
    }

    /// Returns the rows of a period, and those of each source in it.
    pub fn period(&self) -> (u64, &[u32]) {
        (self.period.len() as u64, &self.counts)
    }

    /// Returns the source of the row at a position, and which of the source's rows it is, both from 0.
    pub fn at(&self, position: u64) -> (usize, u64) {
        let length = self.period.len() as u64;
        let (source, before) = self.period[(position % length) as usize];
        let number = position / length * u64::from(self.counts[source as usize]) + u64::from(before);
        (source as usize, number)
    }
}

fn refuse(reason: String) -> Error {
    Error::config("mixture", reason)
}

/// The digits behind the point of a weight.
fn decimals(weight: f64) -> Result<usize> {
    if !weight.is_finite() || weight <= 0.0 {
        return Err(refuse(format!(
            "a weight is {weight}; expected a number above 0; leave such a source out"
        )));
    }
    let text = weight.to_string();
    let digits = text.split_once('.').map_or(0, |(_, digits)| digits.len());
    if digits > DIGITS || weight > LONGEST as f64 {
        return Err(refuse(format!(
            "a weight is {weight}; expected at most {DIGITS} digits behind the point, and at most {LONGEST}"
        )));
    }
    Ok(digits)
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// The sources of a period, each with how many of its rows come before.
fn period(counts: &[u64], length: u64) -> Vec<(u32, u32)> {
    let slack = 2 * (counts.len() as u128) - 2;
    let mut given = vec![0_u64; counts.len()];
    (1..=length)
        .map(|row| {
            let may_come = |source: &usize| {
                let due = i128::from(counts[*source]) * i128::from(row)
                    - i128::from(given[*source]) * i128::from(length);
                due * slack as i128 >= i128::from(length)
            };
            // The source with the least ((x + 1)·(2K − 2) − 1) / c; among equal ones the first.
            let deadline =
                |source: usize| (u128::from(given[source]) + 1) * slack.max(1) - u128::from(slack > 0);
            let earlier = |a: &usize, b: &usize| {
                let (own, other) =
                    (deadline(*a) * u128::from(counts[*b]), deadline(*b) * u128::from(counts[*a]));
                own.cmp(&other)
            };
            let source = (0..counts.len()).filter(may_come).min_by(earlier).unwrap_or(0);
            given[source] += 1;
            (source as u32, (given[source] - 1) as u32)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The largest |x_k(t) − λ_k·t| over two periods, and whether each source's rows are numbered in order.
    fn worst(mixture: &Mixture) -> (f64, bool) {
        let (length, counts) = mixture.period();
        let (mut given, mut worst, mut is_in_order) = (vec![0_u64; counts.len()], 0.0_f64, true);
        for position in 0..2 * length {
            let (source, number) = mixture.at(position);
            is_in_order &= number == given[source];
            given[source] += 1;
            for (given, count) in given.iter().zip(counts) {
                let share = f64::from(*count) * (position + 1) as f64 / length as f64;
                worst = worst.max((*given as f64 - share).abs());
            }
        }
        (worst, is_in_order)
    }

    #[test]
    fn every_prefix_has_the_shares_to_within_a_row() {
        for weights in [
            &[1.0][..],
            &[0.7, 0.3],
            &[2.0, 1.0],
            &[1.0; 7],
            &[0.01, 0.01, 0.01, 0.97],
            &[0.333, 0.333, 0.334],
            &[100.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            &[0.123456, 0.876544],
        ] {
            let mixture = Mixture::new(weights).unwrap();
            let (worst, is_in_order) = worst(&mixture);
            let bound = 1.0 - 1.0 / (2.0 * weights.len() as f64 - 2.0).max(1.0);
            assert!(worst <= bound + 1e-9, "{weights:?}: {worst}");
            assert!(is_in_order, "{weights:?}");
            let (length, counts) = mixture.period();
            let sum: f64 = weights.iter().sum();
            for (count, weight) in counts.iter().zip(weights) {
                assert!((f64::from(*count) / length as f64 - weight / sum).abs() < 1e-12, "{weights:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_weights_have_a_source_for_every_row(weights in prop::collection::vec(1_u32..60, 1..9)) {
            let weights: Vec<f64> = weights.into_iter().map(f64::from).collect();
            let (worst, is_in_order) = worst(&Mixture::new(&weights).unwrap());
            prop_assert!(worst < 1.0 && is_in_order, "{weights:?}: {worst}");
        }
    }

    #[test]
    fn weights_without_an_order_are_refused() {
        let refused = |weights: &[f64]| Mixture::new(weights).unwrap_err().to_string();
        assert!(refused(&[]).contains("no sources"));
        assert!(refused(&[1.0, 0.0]).contains("a weight is 0; expected a number above 0"));
        assert!(refused(&[-1.0]).contains("a weight is -1"));
        assert!(refused(&[f64::NAN]).contains("a weight is NaN"));
        assert!(refused(&[1.0 / 3.0, 0.5]).contains("at most 6 digits"));
        assert!(refused(&[1_000_000.0, 0.000_001]).contains("round them"));
    }
}
