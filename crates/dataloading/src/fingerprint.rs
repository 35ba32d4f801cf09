//! A 64-bit fingerprint of data and options, the same in every process and on every platform.
//!
//! Each number is mixed with all before it by the finaliser of SplitMix64 (Steele, Lea and Flood 2014): `state ← mix(state
//! ⊕ number) + c`. It detects accidental differences; it is not cryptographic.

use crate::permutation::mix;

/// Version of the batch sequence. Increased when the same data, options and seed give other batches than before, so that a
/// state of the former sequence is refused.
pub const SEQUENCE: u64 = 1;

/// A hasher of numbers in order.
///
/// ```
/// use dataloading::fingerprint::Fingerprint;
///
/// let of = |numbers: [u64; 2]| Fingerprint::new("pairs").number(numbers[0]).number(numbers[1]).finish();
/// assert_eq!(of([1, 2]), of([1, 2]));
/// assert_ne!(of([1, 2]), of([2, 1]));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint(u64);

impl Fingerprint {
    /// Creates a hasher for a kind of data.
    pub fn new(kind: &str) -> Self {
        kind.bytes().fold(Self(0).number(kind.len() as u64), |all, byte| all.number(byte.into()))
    }

    /// Adds a number.
    pub fn number(self, number: u64) -> Self {
        Self(mix(self.0 ^ number).wrapping_add(0x9e37_79b9_7f4a_7c15))
    }

    /// Adds numbers and their count.
    pub fn numbers(self, numbers: impl ExactSizeIterator<Item = u64>) -> Self {
        let count = numbers.len() as u64;
        numbers.fold(self.number(count), Self::number)
    }

    /// Returns the fingerprint.
    pub fn finish(self) -> u64 {
        mix(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_are_stable() {
        let all = Fingerprint::new("StandardDataset").number(7).numbers([1, u64::MAX].into_iter());
        assert_eq!(all.finish(), 1_292_493_112_170_259_808);
    }

    #[test]
    fn fingerprints_depend_on_order_count_and_kind() {
        let names = [
            Fingerprint::new(""),
            Fingerprint::new("a"),
            Fingerprint::new("").number(0),
            Fingerprint::new("").number(0).number(0),
            Fingerprint::new("").numbers([].into_iter()).number(1),
            Fingerprint::new("").numbers([1].into_iter()),
            Fingerprint::new("").number(1).number(2),
            Fingerprint::new("").number(2).number(1),
        ];
        let different: std::collections::BTreeSet<u64> = names.iter().map(|name| name.finish()).collect();
        assert_eq!(different.len(), names.len());
    }
}
