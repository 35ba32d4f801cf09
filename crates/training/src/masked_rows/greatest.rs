//! The greatest few of many values.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The greatest few of many values.
pub(super) struct Greatest<T> {
    count: usize,
    values: BinaryHeap<Reverse<T>>,
}

impl<T: Ord> Greatest<T> {
    pub(super) fn new(count: usize) -> Self {
        Self { count, values: BinaryHeap::new() }
    }

    pub(super) fn add(&mut self, value: T) {
        self.values.push(Reverse(value));
        if self.values.len() > self.count {
            self.values.pop();
        }
    }

    pub(super) fn falling(self) -> Vec<T> {
        self.values.into_sorted_vec().into_iter().map(|Reverse(value)| value).collect()
    }
}
