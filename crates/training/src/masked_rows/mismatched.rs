//! Prompts with answers of other prompts, from which an objective over rated answers estimates how far the model is from the reference.
//!
//! Row i gets the answer of row i + ⌊(√5 − 1)/2·N⌋ (mod N), or of the next one after it whose prompt is another: the same in every epoch,
//! whatever the batches, so that its log-probability by the reference can be known before the training. Data are often in an order in which
//! the answers of one prompt follow each other, or are half of the data apart; with this distance they do not meet.

use super::batch::Item;
use super::{Arrangement, MaskedBatches, MaskedRow};
use crate::error::Result;

/// The golden section.
const STRIDE: f64 = 0.618_033_988_749_895;
/// Rows that are looked at for another prompt.
const LOOKED_AT: usize = 64;

/// The mismatched rows of a batch.
pub(super) struct Mismatched<'a> {
    batches: &'a MaskedBatches,
    reference: Option<&'a [f32]>,
    items: Vec<Item>,
}

impl<'a> Mismatched<'a> {
    pub(super) fn new(batches: &'a MaskedBatches, reference: Option<&'a [f32]>) -> Self {
        Self { batches, reference, items: Vec::new() }
    }

    /// Adds the prompt of row `number` with another answer, cut to the longest row there is.
    pub(super) fn add(&mut self, row: &MaskedRow, number: usize) -> Result<()> {
        let other = self.other(row, number)?;
        let (mut tokens, start) = (row.prompt().to_vec(), other.prompt().len());
        let mut labels = vec![dataloading::IGNORE_INDEX; tokens.len()];
        tokens.extend_from_slice(&other.tokens[start..]);
        labels.extend_from_slice(&other.labels[start..]);
        tokens.truncate(self.batches.longest);
        labels.truncate(self.batches.longest);
        let reference = self.reference.map(|known| known[2 * number + 1]);
        let row = MaskedRow::new(tokens, labels);
        self.items.push(Item { row, learns_prompt: false, is_chosen: false, reference, taught: None });
        Ok(())
    }

    /// The row whose answer row `number` gets.
    fn other(&self, row: &MaskedRow, number: usize) -> Result<MaskedRow> {
        let rows = &self.batches.rows;
        let first = number + (STRIDE * rows.len() as f64) as usize;
        for next in 0..LOOKED_AT.min(rows.len()) {
            let other = rows.row((first + next) % rows.len())?;
            if other.prompt() != row.prompt() {
                return Ok(other);
            }
        }
        // All have one prompt.
        rows.row(first % rows.len())
    }

    /// The rows of the batch: each has one of them, all, or as many as fit if rows are packed.
    pub(super) fn rows(self) -> Vec<Vec<Item>> {
        let capacity = match self.batches.layout.arrangement {
            Arrangement::Padded => return self.items.into_iter().map(|item| vec![item]).collect(),
            Arrangement::PaddingFree => return vec![self.items],
            Arrangement::Packed(capacity) => capacity,
        };
        let mut rows: Vec<(usize, Vec<Item>)> = Vec::new();
        for item in self.items {
            let positions = super::positions(&item.row);
            match rows.iter_mut().find(|(taken, _)| taken + positions <= capacity) {
                Some((taken, items)) => {
                    *taken += positions;
                    items.push(item);
                }
                None => rows.push((positions, vec![item])),
            }
        }
        rows.into_iter().map(|(_, items)| items).collect()
    }
}
