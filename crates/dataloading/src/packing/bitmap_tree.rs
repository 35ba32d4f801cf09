//! A set of small integers with fast successor search.
//!
//! The leaves are 64-bit words with one bit per number; a word of the level above has one bit for each non-empty word
//! below. A set over `0..n` has `⌈log₆₄ n⌉` levels, and each step is one shift and one count of trailing zeros.

/// A set of integers below a limit.
#[derive(Debug, Clone)]
pub struct BitmapTree {
    /// Levels of words, leaves first, a single word last.
    levels: Vec<Vec<u64>>,
}

impl BitmapTree {
    /// Creates an empty set over `0..limit`.
    pub fn new(limit: usize) -> Self {
        let mut levels = Vec::new();
        let mut size = limit.max(1);
        loop {
            size = size.div_ceil(64);
            levels.push(vec![0; size]);
            if size == 1 {
                return Self { levels };
            }
        }
    }

    /// Adds a number.
    ///
    /// # Panics
    /// The number is at least the limit, rounded up to a multiple of 64.
    pub fn insert(&mut self, number: usize) {
        let mut position = number;
        for level in &mut self.levels {
            let word = &mut level[position / 64];
            let was_empty = *word == 0;
            *word |= 1 << (position % 64);
            if !was_empty {
                return;
            }
            position /= 64;
        }
    }

    /// Removes a number, if present.
    ///
    /// # Panics
    /// Same as [`BitmapTree::insert`].
    pub fn remove(&mut self, number: usize) {
        let mut position = number;
        for level in &mut self.levels {
            let word = &mut level[position / 64];
            *word &= !(1 << (position % 64));
            if *word != 0 {
                return;
            }
            position /= 64;
        }
    }

    /// Returns the smallest number of at least `number`.
    pub fn at_least(&self, number: usize) -> Option<usize> {
        let mut position = number;
        for height in 0..self.levels.len() {
            let word = self.levels[height].get(position / 64)?;
            let rest = word & (!0 << (position % 64));
            if rest != 0 {
                let number = position / 64 * 64 + rest.trailing_zeros() as usize;
                return Some(self.descend(height, number, |word| word.trailing_zeros()));
            }
            // On the level above, the words after this one.
            position = position / 64 + 1;
        }
        None
    }

    /// Returns the largest number of at most `number`.
    pub fn at_most(&self, number: usize) -> Option<usize> {
        let mut position = number.min(self.levels[0].len() * 64 - 1);
        for height in 0..self.levels.len() {
            let rest = self.levels[height][position / 64] & (!0 >> (63 - position % 64));
            if rest != 0 {
                let number = position / 64 * 64 + 63 - rest.leading_zeros() as usize;
                return Some(self.descend(height, number, |word| 63 - word.leading_zeros()));
            }
            position = (position / 64).checked_sub(1)?;
        }
        None
    }

    /// Returns the largest number.
    pub fn last(&self) -> Option<usize> {
        self.at_most(usize::MAX)
    }

    /// Descends from a bit of a level to a leaf.
    fn descend(&self, height: usize, position: usize, choose: impl Fn(u64) -> u32) -> usize {
        self.levels[..height]
            .iter()
            .rev()
            .fold(position, |position, level| position * 64 + choose(level[position]) as usize)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn agrees_with_an_ordered_set(
            limit in prop_oneof![1_usize..200, 4000..5000_usize, 262_000..270_000_usize],
            steps in proptest::collection::vec((0_usize..1 << 20, any::<bool>()), 1..200),
        ) {
            let (mut tree, mut set) = (BitmapTree::new(limit), BTreeSet::new());
            for (number, insert) in steps {
                let number = number % limit;
                if insert {
                    tree.insert(number);
                    set.insert(number);
                } else {
                    tree.remove(number);
                    set.remove(&number);
                }
                for probe in [0, number.saturating_sub(1), number, number + 1, limit - 1, limit + 70] {
                    prop_assert_eq!(tree.at_least(probe), set.range(probe..).next().copied());
                    prop_assert_eq!(tree.at_most(probe), set.range(..=probe).next_back().copied());
                }
                prop_assert_eq!(tree.last(), set.last().copied());
            }
        }
    }
}
