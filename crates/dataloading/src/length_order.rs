//! Samples sorted by length, by counting sort.
//!
//! With lengths up to `m` it takes `O(n + m)` time and `4·(n + m)` bytes. The sort is stable: samples of equal length stay
//! in the order of the data set.

use crate::error::{Error, Result};
use crate::samples::Samples;

/// Sample indices sorted by length.
#[derive(Debug, Clone)]
pub(crate) struct LengthOrder {
    /// The samples, shortest first.
    pub(crate) order: Vec<u32>,
    /// The start of each length in `order`: samples of length `l` are `starts[l]..starts[l + 1]`.
    pub(crate) starts: Vec<u32>,
}

impl LengthOrder {
    /// Sorts samples whose lengths are at most `longest`.
    pub(crate) fn new(lengths: &[u32], longest: u32) -> Self {
        let mut starts = vec![0_u32; longest as usize + 2];
        for &length in lengths {
            starts[length as usize + 1] += 1;
        }
        for length in 1..starts.len() {
            starts[length] += starts[length - 1];
        }
        let mut next = starts.clone();
        let mut order = vec![0; lengths.len()];
        for (sample, &length) in (0..).zip(lengths) {
            let position = &mut next[length as usize];
            order[*position as usize] = sample;
            *position += 1;
        }
        Self { order, starts }
    }

    /// Returns the number of samples of this length.
    pub(crate) fn count(&self, length: u32) -> u32 {
        self.starts[length as usize + 1] - self.starts[length as usize]
    }
}

/// Returns the lengths of all samples.
///
/// # Errors
/// There are no samples; there are too many, or too long ones, for 32-bit indices; a sample without tokens cannot be read.
pub(crate) fn lengths_of<S: Samples + ?Sized>(what: &'static str, samples: &S) -> Result<Vec<u32>> {
    let limit = u32::MAX as usize - 1;
    if samples.is_empty() {
        return Err(Error::Empty {
            from: what.into(),
            reason: "the data set has no samples; expected at least one".into(),
        });
    }
    if samples.len() > limit {
        return Err(Error::Config {
            what,
            reason: format!("{} samples; at most {limit} are supported; split the data set", samples.len()),
        });
    }
    let mut none = Vec::new();
    let length = |index: usize| {
        let length = samples.length(index);
        if length == 0 {
            // A damaged sample may report length 0, and would never be read again.
            none.clear();
            samples.read(index, &mut none)?;
        }
        u32::try_from(length).ok().filter(|&length| length < u32::MAX).ok_or_else(|| Error::Record {
            from: what.into(),
            location: format!("sample {index}"),
            reason: format!("{length} tokens; at most {limit} are supported; split the sample"),
        })
    };
    (0..samples.len()).map(length).collect()
}

/// The usable samples of a data set: those with at least one token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsableSamples {
    /// Their indices; `None` if all are usable.
    kept: Option<Vec<u32>>,
    used: usize,
    total: usize,
    truncated: usize,
    truncated_tokens: u64,
}

impl UsableSamples {
    /// # Errors
    /// No sample has a token; `max_length` is 0.
    pub(crate) fn new(what: &'static str, lengths: &[u32], max_length: usize) -> Result<Self> {
        if max_length == 0 {
            return Err(Error::Config { what, reason: "max_length is 0; expected at least 1 token".into() });
        }
        let empty = lengths.iter().filter(|&&length| length == 0).count();
        if empty == lengths.len() {
            return Err(Error::Empty {
                from: what.into(),
                reason: format!(
                    "none of {} samples has a token; check the format of the text",
                    lengths.len()
                ),
            });
        }
        let kept = (empty > 0).then(|| (0..).zip(lengths).filter(|&(_, &l)| l > 0).map(|(i, _)| i).collect());
        let used = lengths.len() - empty;
        let excess = lengths.iter().map(|&length| (length as usize).saturating_sub(max_length) as u64);
        let (truncated, truncated_tokens) =
            excess.filter(|&b| b > 0).fold((0, 0), |(n, sum), b| (n + 1, sum + b));
        Ok(Self { kept, used, total: lengths.len(), truncated, truncated_tokens })
    }

    /// Returns the number of usable samples.
    pub fn len(&self) -> usize {
        self.used
    }

    /// Returns whether there are none; always false for a data set that was created.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of samples of the data set.
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    /// Returns the number of samples skipped because they have no token.
    pub fn skipped(&self) -> usize {
        self.total - self.len()
    }

    /// Returns the number of samples longer than `max_length`, which are truncated.
    pub fn truncated(&self) -> usize {
        self.truncated
    }

    /// Returns the number of tokens truncated.
    pub fn truncated_tokens(&self) -> u64 {
        self.truncated_tokens
    }

    /// Drops the indices and keeps the counts.
    pub(crate) fn without_numbers(self) -> Self {
        Self { kept: None, ..self }
    }

    /// Returns the index in the data set of usable sample `position`.
    pub(crate) fn sample(&self, position: usize) -> u32 {
        self.kept.as_ref().map_or(position as u32, |kept| kept[position])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counting_sorts_and_is_stable() {
        let order = LengthOrder::new(&[3, 1, 0, 3, 1, 2], 4);
        assert_eq!(order.order, [2, 1, 4, 5, 0, 3]);
        assert_eq!(order.starts, [0, 1, 3, 4, 6, 6]);
        assert_eq!(order.count(3), 2);
    }

    #[test]
    fn unusable_samples_are_counted() {
        let usable = UsableSamples::new("test", &[0, 5, 9, 0, 7], 6).unwrap();
        assert_eq!(
            (usable.len(), usable.skipped(), usable.truncated(), usable.truncated_tokens()),
            (3, 2, 2, 4)
        );
        assert_eq!((0..3).map(|position| usable.sample(position)).collect::<Vec<_>>(), [1, 2, 4]);
    }

    #[test]
    fn no_usable_sample_is_an_error() {
        let check =
            |result: Result<UsableSamples>, words: &str| assert_eq!(result.unwrap_err().to_string(), words);
        check(
            UsableSamples::new("StandardDataset", &[0, 0], 6),
            "StandardDataset: none of 2 samples has a token; check the format of the text",
        );
        check(
            UsableSamples::new("StandardDataset", &[1], 0),
            "StandardDataset: max_length is 0; expected at least 1 token",
        );
        let none: Vec<Vec<u32>> = Vec::new();
        assert_eq!(
            lengths_of("StandardDataset", &none).unwrap_err().to_string(),
            "StandardDataset: the data set has no samples; expected at least one"
        );
    }
}
