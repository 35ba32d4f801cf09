//! How the elements of a flat tensor are divided among ranks.

use std::ops::Range;

/// A flat tensor of `elements` elements: rank `k` has those from `k · per_rank` to `(k + 1) · per_rank`, as far as there are
/// any: the last shard may be short, and shards may be empty.
///
/// ```
/// use runtime::collectives::Division;
///
/// let even = Division::even(10, 4);
/// assert_eq!((0..4).map(|rank| even.range(rank)).collect::<Vec<_>>(), [0..3, 3..6, 6..9, 9..10]);
/// let blocks = Division { elements: 10, per_rank: 8 };
/// assert_eq!((0..3).map(|rank| blocks.range(rank)).collect::<Vec<_>>(), [0..8, 8..10, 10..10]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// Elements of the whole tensor.
    pub elements: i64,
    /// Elements of every shard before the last.
    pub per_rank: i64,
}

impl Division {
    /// Divides `elements` as evenly as equal shards allow.
    pub fn even(elements: i64, ranks: usize) -> Self {
        let ranks = i64::try_from(ranks).unwrap_or(i64::MAX).max(1);
        Self { elements, per_rank: elements / ranks + i64::from(elements % ranks != 0) }
    }

    /// Returns the elements of a rank.
    pub fn range(&self, rank: usize) -> Range<i64> {
        let at = |rank: usize| {
            let rank = i64::try_from(rank).unwrap_or(i64::MAX);
            self.per_rank.saturating_mul(rank).min(self.elements)
        };
        at(rank)..at(rank.saturating_add(1))
    }

    /// Returns the number of elements of a rank.
    pub fn len(&self, rank: usize) -> i64 {
        let range = self.range(rank);
        range.end - range.start
    }

    /// Returns whether all of `ranks` ranks have as many elements.
    pub(super) fn is_equal(&self, ranks: usize) -> bool {
        i64::try_from(ranks).is_ok_and(|ranks| self.per_rank.saturating_mul(ranks) == self.elements)
    }

    /// Returns whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.elements == 0
    }
}
