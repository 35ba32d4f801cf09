//! Statistics of sample lengths, and the padding that each batching strategy would waste.
//!
//! Computed from lengths `l₁ … lₙ` only. A batch of `b` samples padded to its longest has `b · max` positions. Over all
//! random batches without replacement, `P(max ≤ l) = C(c(l), b) / C(n, b)` with `c(l)` the number of samples no longer than
//! `l`, so the expected number of positions is exact, without sampling:
//!
//! `positions = Σ over batches of b · Σₗ l · (P(max ≤ l) − P(max ≤ l − 1))`
//!
//! where the last batch of an epoch may be smaller. Waste is the share of positions without a token.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::samples::Samples;

/// A histogram of the sample lengths of a data set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LengthStatistics {
    counts: BTreeMap<usize, u64>,
    samples: u64,
    tokens: u128,
}

/// A bin of lengths in `from..to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Bin {
    /// The smallest length of the bin.
    pub from: usize,
    /// The first length beyond the bin.
    pub to: usize,
    /// The number of samples.
    pub samples: u64,
}

/// The padding and truncation of a batching strategy in one epoch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Waste {
    /// Positions in all batches; an expectation for random batches.
    pub positions: f64,
    /// Tokens in them.
    pub tokens: f64,
    /// Tokens dropped because they did not fit.
    pub dropped: f64,
}

impl Waste {
    /// Returns the share of positions without a token, 0 to 1.
    pub fn share(&self) -> f64 {
        if self.positions == 0.0 { 0.0 } else { 1.0 - self.tokens / self.positions }
    }
}

impl LengthStatistics {
    /// Counts these lengths.
    ///
    /// # Errors
    /// There are no lengths.
    pub fn new(lengths: impl IntoIterator<Item = usize>) -> Result<Self> {
        let (mut counts, mut samples, mut tokens) = (BTreeMap::new(), 0, 0);
        for length in lengths {
            *counts.entry(length).or_insert(0) += 1;
            samples += 1;
            tokens += length as u128;
        }
        if samples == 0 {
            return Err(Error::Empty {
                from: "length statistics".into(),
                reason: "there are no samples; expected at least one".into(),
            });
        }
        Ok(Self { counts, samples, tokens })
    }

    /// Counts the lengths of a data set.
    ///
    /// # Errors
    /// The data set is empty.
    pub fn from_samples(samples: &(impl Samples + ?Sized)) -> Result<Self> {
        Self::new((0..samples.len()).map(|index| samples.length(index)))
    }

    /// Returns the number of samples.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> u128 {
        self.tokens
    }

    /// Returns the mean length.
    pub fn mean(&self) -> f64 {
        self.tokens as f64 / self.samples as f64
    }

    /// Returns the maximum length.
    pub fn max(&self) -> usize {
        self.counts.keys().next_back().copied().unwrap_or(0)
    }

    /// Returns the smallest length that at least a share `q` of the samples does not exceed; `q` is clamped to 0..1.
    pub fn quantile(&self, q: f64) -> usize {
        let rank = (q.clamp(0.0, 1.0) * self.samples as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        let reached = self.counts.iter().find(|(_, count)| {
            seen += **count;
            seen >= rank
        });
        reached.map_or(self.max(), |(length, _)| *length)
    }

    /// Returns the number of samples in bins of `width` tokens, from 0 to the maximum length; a width of 0 counts as 1.
    pub fn histogram(&self, width: usize) -> Vec<Bin> {
        let width = width.max(1);
        let bins = 0..=self.max() / width;
        bins.map(|bin| {
            let (from, to) = (bin * width, (bin + 1) * width);
            Bin { from, to, samples: self.counts.range(from..to).map(|(_, count)| count).sum() }
        })
        .collect()
    }

    /// Returns the waste of truncating or padding every sample that has a token to `length`: the assignment's
    /// `BaseDataset`.
    pub fn padded_to(&self, length: usize) -> Waste {
        let tokens = self.cut(length);
        Waste {
            positions: (self.samples - self.empty()) as f64 * length as f64,
            tokens: tokens as f64,
            dropped: (self.tokens - tokens) as f64,
        }
    }

    /// Returns the expected waste of random batches of `size` samples that have a token, each padded to its longest, with
    /// samples truncated to `longest`: the assignment's `StandardDataset`. A size of 0 counts as 1.
    pub fn padded_to_batch(&self, size: usize, longest: usize) -> Waste {
        let used = self.samples - self.empty();
        let size = (size as u64).min(used).max(1);
        let (full, rest) = (used / size, used % size);
        let positions = |size: u64| size as f64 * self.expected_longest(size, longest);
        let tokens = self.cut(longest);
        Waste {
            positions: full as f64 * positions(size) + if rest > 0 { positions(rest) } else { 0.0 },
            tokens: tokens as f64,
            dropped: (self.tokens - tokens) as f64,
        }
    }

    /// Returns the number of samples without a token, which no data set uses.
    fn empty(&self) -> u64 {
        self.counts.get(&0).copied().unwrap_or(0)
    }

    /// Returns the number of tokens when samples are truncated to `longest`.
    fn cut(&self, longest: usize) -> u128 {
        self.counts.iter().map(|(length, count)| (*length).min(longest) as u128 * u128::from(*count)).sum()
    }

    /// Returns the expected length of the longest of `size` samples that have a token, drawn without replacement and
    /// truncated to `longest`.
    fn expected_longest(&self, size: u64, longest: usize) -> f64 {
        let (mut expected, mut below, mut before) = (0.0, 0, 0.0);
        let used = self.samples - self.empty();
        for (length, count) in self.counts.range(1..) {
            below += count;
            // C(below, size) / C(samples, size), as a product of factors of at most one.
            let within: f64 = if below < size {
                0.0
            } else {
                (0..size).map(|i| (below - i) as f64 / (used - i) as f64).product()
            };
            expected += (*length).min(longest) as f64 * (within - before);
            before = within;
        }
        expected
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the positions of the batches, summed over every order of the lengths, and the number of orders.
    fn over_all_orders(lengths: &mut [usize], fixed: usize, size: usize, longest: usize) -> (f64, f64) {
        if fixed == lengths.len() {
            let positions = lengths.chunks(size).map(|batch| {
                let longest = batch.iter().map(|length| (*length).min(longest)).max().unwrap_or(0);
                (batch.len() * longest) as f64
            });
            return (positions.sum(), 1.0);
        }
        let (mut sum, mut orders) = (0.0, 0.0);
        for other in fixed..lengths.len() {
            lengths.swap(fixed, other);
            let (positions, count) = over_all_orders(lengths, fixed + 1, size, longest);
            sum += positions;
            orders += count;
            lengths.swap(fixed, other);
        }
        (sum, orders)
    }

    #[test]
    fn the_expected_padding_is_the_mean_over_all_orders() {
        let lengths = [3, 9, 9, 1, 6, 14];
        // No data set uses a sample without tokens.
        let statistics = LengthStatistics::new(lengths.into_iter().chain([0, 0])).unwrap();
        assert_eq!(statistics.padded_to(8).positions, 48.0);
        for size in 1..=9 {
            for longest in [100, 8] {
                let (sum, orders) = over_all_orders(&mut lengths.clone(), 0, size, longest);
                let ours = statistics.padded_to_batch(size, longest).positions;
                assert!((ours - sum / orders).abs() < 1e-9, "{size} {longest}: {ours} {}", sum / orders);
            }
        }
    }

    #[test]
    fn quantiles_bins_and_waste() {
        let statistics = LengthStatistics::new([4, 1, 2, 3, 10]).unwrap();
        let quantiles = [0.0, 0.2, 0.21, 0.5, 0.8, 0.81, 1.0].map(|q| statistics.quantile(q));
        assert_eq!(quantiles, [1, 1, 2, 3, 4, 10, 10]);
        assert_eq!((statistics.mean(), statistics.max(), statistics.samples()), (4.0, 10, 5));
        let bins = statistics.histogram(4);
        assert_eq!(bins.iter().map(|bin| bin.samples).collect::<Vec<_>>(), [3, 1, 1]);
        let base = statistics.padded_to(8);
        assert_eq!(base, Waste { positions: 40.0, tokens: 18.0, dropped: 2.0 });
        assert!((base.share() - 0.55).abs() < 1e-12);
        assert_eq!(LengthStatistics::new([0]).unwrap().padded_to_batch(4, 8).share(), 0.0);
        assert!(LengthStatistics::new([]).is_err());
    }

    #[test]
    fn padding_is_zero_for_batches_of_one_and_maximal_for_one_batch() {
        let statistics = LengthStatistics::new((1..=100).map(|i| i * i % 37)).unwrap();
        assert!(statistics.padded_to_batch(1, 1000).share().abs() < 1e-12);
        let all = statistics.padded_to_batch(100, 1000);
        assert!((all.positions - statistics.padded_to(statistics.max()).positions).abs() < 1e-6);
    }
}
