//! The sizes of batches, without reading their rows.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use dataloading::Batch;

use super::{Arrangement, MaskedBatches, MaskedRow, RowSize};
use crate::error::Result;

/// The sizes of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// Rows.
    pub rows: usize,
    /// Positions of each, padding included; of rows without padding the mean, rounded up.
    pub length: usize,
    /// Positions of the longest row.
    pub longest: usize,
    /// Positions with a label.
    pub labelled: usize,
}

/// The number of positions of a row.
pub(super) fn positions(row: &MaskedRow) -> usize {
    row.tokens.len() - 1
}

/// The same of its size: tokens that predict a next one.
pub(super) fn positions_of(size: RowSize) -> usize {
    size.tokens.saturating_sub(1)
}

impl MaskedBatches {
    /// Returns the batch with the most tokens possible: that of the longest rows.
    ///
    /// # Errors
    /// Errors of libtorch; a file that cannot be read.
    pub fn largest(&self) -> Result<Batch> {
        let mut widest = Greatest::new(self.layout.batch);
        for number in 0..self.units() {
            widest.add((self.size_of(number)?.0, Reverse(number)));
        }
        self.batch(&widest.falling().into_iter().map(|(_, Reverse(number))| number).collect::<Vec<_>>())
    }

    /// Returns sizes that no batch exceeds: those of the longest rows, and as many labels as the rows with the most labels have.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn largest_shape(&self) -> Result<BatchShape> {
        let (mut labels, mut widths) = (Greatest::new(self.layout.batch), Greatest::new(self.layout.batch));
        for number in 0..self.units() {
            let (width, learned) = self.size_of(number)?;
            labels.add(learned);
            widths.add(width);
        }
        Ok(self.shape(&widths.falling(), labels.falling().into_iter().sum()))
    }

    /// The sizes of a batch of units with these positions, and so many labels.
    fn shape(&self, widths: &[usize], labelled: usize) -> BatchShape {
        let rows = widths.len() * self.rows_of_unit();
        let longest =
            self.layout.arrangement.capacity().or_else(|| widths.iter().copied().max()).unwrap_or(0);
        let length = match self.layout.arrangement {
            Arrangement::PaddingFree => widths.iter().sum::<usize>().div_ceil(rows.max(1)),
            Arrangement::Padded | Arrangement::Packed(_) => longest,
        };
        BatchShape { rows, length, longest, labelled }
    }

    /// Returns the positions and the labels of a unit: of its longest row, if rows are padded.
    pub(super) fn size_of(&self, unit: usize) -> Result<(usize, usize)> {
        self.unit(unit).try_fold((0, 0), |(width, labels), row| {
            let size = self.rows.size(row)?;
            let positions = positions_of(size);
            let learned = if self.layout.grouping.learns_prompt(row) { positions } else { size.learned };
            let width = if self.holds_documents() { width + positions } else { width.max(positions) };
            Ok((width, labels + learned))
        })
    }

    /// Returns the sizes of the next `count` batches, or of as many as there are. Each is an error if a file cannot be read.
    pub fn shapes(&self, count: u64) -> impl Iterator<Item = Result<BatchShape>> + '_ {
        (self.position..self.position.saturating_add(count)).map_while(move |position| {
            let numbers = match self.numbers(position).transpose()? {
                Ok(numbers) => numbers,
                Err(error) => return Some(Err(error)),
            };
            let sizes = numbers.iter().map(|number| self.size_of(*number)).collect::<Result<Vec<_>>>();
            Some(sizes.map(|sizes| {
                let (widths, labels): (Vec<usize>, Vec<usize>) = sizes.into_iter().unzip();
                self.shape(&widths, labels.into_iter().sum())
            }))
        })
    }
}

/// The greatest few of many values.
struct Greatest<T> {
    count: usize,
    values: BinaryHeap<Reverse<T>>,
}

impl<T: Ord> Greatest<T> {
    fn new(count: usize) -> Self {
        Self { count, values: BinaryHeap::new() }
    }

    fn add(&mut self, value: T) {
        self.values.push(Reverse(value));
        if self.values.len() > self.count {
            self.values.pop();
        }
    }

    fn falling(self) -> Vec<T> {
        self.values.into_sorted_vec().into_iter().map(|Reverse(value)| value).collect()
    }
}
