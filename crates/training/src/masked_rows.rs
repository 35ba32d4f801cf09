//! Fine-tuning batches: tokenized rows with a loss mask, padded or packed.
//!
//! A row of n tokens has n − 1 positions; each predicts the next token if its label is set. Rows are padded on the right to the
//! longest of their batch, or packed best-fit decreasing ([`dataloading::packing`]) into rows of one length, in which rows do
//! not attend to each other. Each epoch's order is a permutation given by the seed, so the state of the source is one number.
//!
//! ```
//! use tch::Device;
//! use training::Batches;
//! use training::masked_rows::{Layout, MaskedBatches, MaskedRow};
//!
//! // A prompt of two tokens without loss, and an answer of two.
//! let row = MaskedRow { tokens: vec![5, 6, 7, 0], labels: vec![-100, -100, 7, 0] };
//! let mut batches = MaskedBatches::new(vec![row], Layout { batch: 1, ..Layout::default() }, Device::Cpu)?;
//! let batch = batches.next()?.expect("a first batch");
//! assert_eq!(Vec::<i64>::try_from(batch.labels.view(-1))?, [-100, 7, 0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use dataloading::fingerprint::Fingerprint;
use dataloading::packing::{Algorithm, LongDocuments};
use dataloading::permutation::Permutation;
use dataloading::{Batch, Counts, IGNORE_INDEX, Packing, PackingOptions, PackingPlan};
use models::Documents;
use serde_json::{Value, json};
use tch::{Device, Tensor};

use crate::batches::Batches;
use crate::error::{Error, Result};

/// A tokenized row with its labels. Both lists have the same length.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MaskedRow {
    /// Token ids.
    pub tokens: Vec<i64>,
    /// For each token its id if it is to be predicted, else −100 ([`IGNORE_INDEX`]). Not shifted: position `t` predicts label
    /// `t + 1`.
    pub labels: Vec<i64>,
}

/// How rows are batched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Rows per batch; packed rows, if packed.
    pub batch: usize,
    /// Positions of a packed row; `None` for padding.
    pub packed: Option<usize>,
    /// The padding token.
    pub pad: i64,
    /// The seed of the epochs' orders; `None` keeps the order of the rows.
    pub shuffle: Option<u64>,
    /// Number of epochs; `None` for no end.
    pub epochs: Option<u64>,
}

impl Default for Layout {
    fn default() -> Self {
        Self { batch: 1, packed: None, pad: 0, shuffle: None, epochs: None }
    }
}

/// The sizes of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// Rows.
    pub rows: usize,
    /// Positions of each, padding included.
    pub length: usize,
    /// Positions with a label.
    pub labelled: usize,
}

/// A source of batches over masked rows. See the [module](self).
#[derive(Clone, Debug)]
pub struct MaskedBatches {
    rows: Vec<MaskedRow>,
    /// Indices of the rows that share one row of a batch.
    together: Vec<Vec<usize>>,
    layout: Layout,
    device: Device,
    fingerprint: u64,
    /// The index of the next batch, over all epochs.
    position: u64,
}

const WHAT: &str = "training rows";

fn refuse(reason: String) -> Error {
    Error::Config { what: WHAT, reason }
}

/// The number of positions of a row: tokens that predict a next one.
fn positions_of(row: &MaskedRow) -> usize {
    row.tokens.len().saturating_sub(1)
}

impl MaskedBatches {
    /// Creates a source at the first batch. Rows without a label are left out.
    ///
    /// # Errors
    /// No row with a label; rows whose lists differ in length; a batch size of 0; a row longer than a packed row.
    pub fn new(mut rows: Vec<MaskedRow>, layout: Layout, device: Device) -> Result<Self> {
        if let Some((number, row)) =
            rows.iter().enumerate().find(|(_, row)| row.tokens.len() != row.labels.len())
        {
            let (tokens, labels) = (row.tokens.len(), row.labels.len());
            return Err(refuse(format!(
                "row {number} has {tokens} tokens and {labels} labels; expected one label per token"
            )));
        }
        rows.retain(|row| row.labels.iter().skip(1).any(|label| *label != IGNORE_INDEX));
        if rows.is_empty() || layout.batch == 0 {
            let (count, batch) = (rows.len(), layout.batch);
            return Err(refuse(format!(
                "{count} rows with labels, in batches of {batch}; expected at least 1 of both"
            )));
        }
        let together = match layout.packed {
            None => (0..rows.len()).map(|number| vec![number]).collect(),
            Some(capacity) => packed(&rows, capacity)?,
        };
        let mut all = Fingerprint::new("masked rows");
        for row in &rows {
            for numbers in [&row.tokens, &row.labels] {
                all = all.numbers(numbers.iter().map(|number| number.cast_unsigned()));
            }
        }
        for number in [layout.batch as u64, layout.packed.unwrap_or(0) as u64, layout.shuffle.unwrap_or(0)] {
            all = all.number(number);
        }
        Ok(Self { rows, together, layout, device, fingerprint: all.finish(), position: 0 })
    }

    /// Returns the number of rows of a batch, as the layout has it.
    pub fn rows_per_batch(&self) -> usize {
        self.layout.batch
    }

    /// Returns a source of the same rows in batches of another size, at the first batch.
    ///
    /// # Errors
    /// A batch size of 0.
    pub fn with_rows_per_batch(self, batch: usize) -> Result<Self> {
        Self::new(self.rows, Layout { batch, ..self.layout }, self.device)
    }

    /// Returns whether rows are packed.
    pub fn is_packed(&self) -> bool {
        self.layout.packed.is_some()
    }

    /// Returns the batches per epoch; the last one may have fewer rows.
    pub fn batches_per_epoch(&self) -> u64 {
        self.together.len().div_ceil(self.layout.batch) as u64
    }

    /// Returns the tokens of an epoch, and its padding positions if rows are packed.
    pub fn tokens_and_padding(&self) -> (usize, usize) {
        let tokens: usize = self.rows.iter().map(positions_of).sum();
        let padding = self.layout.packed.map_or(0, |capacity| capacity * self.together.len() - tokens);
        (tokens, padding)
    }

    /// Returns the batch with the most tokens possible: that of the longest rows.
    ///
    /// # Errors
    /// Those of libtorch.
    pub fn largest(&self) -> Result<Batch> {
        let width = |row: &[usize]| row.iter().map(|number| positions_of(&self.rows[*number])).sum::<usize>();
        let mut rows: Vec<&[usize]> = self.together.iter().map(Vec::as_slice).collect();
        rows.sort_by_key(|row| std::cmp::Reverse(width(row)));
        rows.truncate(self.layout.batch);
        self.batch(&rows)
    }

    /// Returns sizes that no batch exceeds: the length of the longest row, and as many labels as the rows with the most labels have.
    pub fn largest_shape(&self) -> BatchShape {
        let sizes: Vec<(usize, usize)> = self.together.iter().map(|row| self.size_of(row)).collect();
        let mut labels: Vec<usize> = sizes.iter().map(|(_, labels)| *labels).collect();
        labels.sort_unstable_by_key(|labels| std::cmp::Reverse(*labels));
        let widest = sizes.iter().map(|(width, _)| *width).max().unwrap_or(0);
        BatchShape {
            rows: self.layout.batch.min(sizes.len()),
            length: self.layout.packed.unwrap_or(widest),
            labelled: labels.iter().take(self.layout.batch).sum(),
        }
    }

    /// Returns the positions and the labels of rows that are together in one.
    fn size_of(&self, together: &[usize]) -> (usize, usize) {
        let rows = together.iter().map(|number| &self.rows[*number]);
        let learnt = |row: &MaskedRow| row.labels[1..].iter().filter(|label| **label != IGNORE_INDEX).count();
        rows.fold((0, 0), |(width, labels), row| (width + positions_of(row), labels + learnt(row)))
    }

    /// Returns the sizes of the next `count` batches, or of as many as there are.
    pub fn shapes(&self, count: u64) -> impl Iterator<Item = BatchShape> + '_ {
        let sizes: Vec<(usize, usize)> = self.together.iter().map(|row| self.size_of(row)).collect();
        (self.position..self.position.saturating_add(count)).map_while(move |position| {
            let of_batch = self.numbers(position)?.into_iter().map(|number| sizes[number]);
            let (rows, widest, labelled) = of_batch
                .fold((0, 0, 0), |(rows, widest, labelled), (width, labels)| {
                    (rows + 1, width.max(widest), labelled + labels)
                });
            Some(BatchShape { rows, length: self.layout.packed.unwrap_or(widest), labelled })
        })
    }

    /// The units of the batch at a position; `None` after the last epoch.
    fn numbers(&self, position: u64) -> Option<Vec<usize>> {
        let (per_epoch, units) = (self.batches_per_epoch(), self.together.len() as u64);
        let (epoch, number) = (position / per_epoch, position % per_epoch);
        if self.layout.epochs.is_some_and(|epochs| epoch >= epochs) {
            return None;
        }
        let order = self.layout.shuffle.map(|seed| Permutation::new(units, seed, epoch, 0));
        let first = number * self.layout.batch as u64;
        let numbers = first..units.min(first + self.layout.batch as u64);
        Some(numbers.map(|number| order.as_ref().map_or(number, |order| order.at(number)) as usize).collect())
    }

    fn batch(&self, rows: &[&[usize]]) -> Result<Batch> {
        let width =
            |row: &&[usize]| row.iter().map(|number| positions_of(&self.rows[*number])).sum::<usize>();
        let length = self.layout.packed.unwrap_or_else(|| rows.iter().map(width).max().unwrap_or(0));
        let mut counts = Counts::default();
        let (mut tokens, mut labels, mut positions, mut lengths) = (vec![], vec![], vec![], vec![]);
        for row in rows {
            let mut documents = Vec::new();
            for number in *row {
                let MaskedRow { tokens: row_tokens, labels: learnt } = &self.rows[*number];
                let own = row_tokens.len() - 1;
                tokens.extend_from_slice(&row_tokens[..own]);
                labels.extend_from_slice(&learnt[1..]);
                positions.extend(0..own as i64);
                counts.targets += learnt[1..].iter().filter(|label| **label != IGNORE_INDEX).count();
                counts.tokens += own;
                counts.documents += 1;
                documents.push(own);
            }
            let rest = length - documents.iter().sum::<usize>();
            if rest > 0 {
                tokens.extend(std::iter::repeat_n(self.layout.pad, rest));
                labels.extend(std::iter::repeat_n(IGNORE_INDEX, rest));
                positions.extend(0..rest as i64);
                counts.padding += rest;
                documents.push(rest);
            }
            lengths.push(documents);
        }
        let shape = [rows.len() as i64, length as i64];
        let tensor = |values: &[i64]| -> Result<Tensor> {
            Ok(Tensor::f_from_slice(values)?.f_reshape(shape)?.f_to_device(self.device)?)
        };
        let packing = match self.layout.packed {
            None => None,
            Some(_) => {
                let documents = Documents::new(&lengths, self.device)?;
                Some(Packing {
                    positions: tensor(&positions)?,
                    document_ids: documents.ids().shallow_clone(),
                    cu_seqlens: documents.cu_seqlens().shallow_clone(),
                    starts: documents.starts().to_vec(),
                    longest: documents.longest(),
                })
            }
        };
        Ok(Batch { tokens: tensor(&tokens)?, labels: tensor(&labels)?, packing, counts })
    }
}

/// Decides which rows share a packed row.
fn packed(rows: &[MaskedRow], capacity: usize) -> Result<Vec<Vec<usize>>> {
    let lengths: Vec<u32> = rows.iter().map(|row| positions_of(row) as u32).collect();
    if let Some((number, row)) = rows.iter().enumerate().find(|(_, row)| positions_of(row) > capacity) {
        return Err(refuse(format!(
            "row {number} has {} positions, but packed rows have {capacity}; use longer packed rows, or leave such rows out",
            positions_of(row)
        )));
    }
    let options = PackingOptions { capacity, algorithm: Algorithm::default(), long: LongDocuments::Drop };
    let assignment = PackingPlan::new(&lengths, &options)?.assignment();
    let row = |ends: &[u32]| {
        let pieces = &assignment.pieces[ends[0] as usize..ends[1] as usize];
        // No row is split, so a piece's number is its row's.
        pieces.iter().map(|piece| *piece as usize).collect()
    };
    Ok(assignment.offsets.windows(2).map(row).collect())
}

impl Batches for MaskedBatches {
    fn next(&mut self) -> Result<Option<Batch>> {
        let Some(numbers) = self.numbers(self.position) else { return Ok(None) };
        let rows: Vec<&[usize]> =
            numbers.into_iter().map(|number| self.together[number].as_slice()).collect();
        let batch = self.batch(&rows)?;
        self.position += 1;
        Ok(Some(batch))
    }

    fn state(&self) -> Value {
        json!({ "rows": format!("{:016x}", self.fingerprint), "position": self.position })
    }

    fn resume(&mut self, state: &Value) -> Result<()> {
        let own = format!("{:016x}", self.fingerprint);
        match state["position"].as_u64().filter(|_| state["rows"] == *own) {
            Some(position) => self.position = position,
            None => {
                return Err(refuse(
                    "the checkpoint was written over other rows, in other batches or in another order; resume with the same \
                     data, prompts, batch size, packing and seed"
                        .to_owned(),
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
