//! Fine-tuning batches: tokenized rows with a loss mask, padded or packed.
//!
//! A row of n tokens has n − 1 positions; each predicts the next token if its label is set. Rows are padded on the right to the
//! longest of their batch, or packed best-fit decreasing ([`dataloading::packing`]) into rows of one length, in which rows do
//! not attend to each other. Each epoch's order is a permutation given by the seed, so the state of the source is one number.
//! The batches of one optimizer step divide its rows by length, the longest first ([`Layout::by_length`]): the step has the same rows, its
//! loss and gradients are the same up to the order of their sums, and there is less padding. (Transformers' `group_by_length` sorts beyond
//! the step, and so changes which rows share one.)
//! Rows are stored in 4 bytes a token, on disk beyond a bound ([`MaskedRows`]); packing takes 8 bytes of memory for each row, padding none.
//!
//! ```
//! use tch::Device;
//! use training::Batches;
//! use training::masked_rows::{Layout, MaskedBatches, MaskedRow};
//!
//! // A prompt of two tokens without loss, and an answer of two.
//! let row = MaskedRow::new(vec![5, 6, 7, 0], vec![-100, -100, 7, 0]);
//! let mut batches = MaskedBatches::new(vec![row], Layout { batch: 1, ..Layout::default() }, Device::Cpu)?;
//! let batch = batches.next()?.expect("a first batch");
//! assert_eq!(Vec::<i64>::try_from(batch.labels.view(-1))?, [-100, 7, 0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod batch;
mod byte_store;
mod greatest;
mod grouping;
mod mismatched;
mod row_store;
mod top_k;

use std::cmp::Reverse;
use std::sync::Arc;

use dataloading::fingerprint::Fingerprint;
use dataloading::packing::{Algorithm, Assignment, LongDocuments};
use dataloading::permutation::Permutation;
use dataloading::{Batch, IGNORE_INDEX, PackingConfig, PackingPlan};
use serde_json::{Value, json};
use tch::Device;

use crate::batches::Batches;
use crate::error::{Error, Result};

pub(crate) use batch::{Item, assemble};
use greatest::Greatest;
pub use grouping::Grouping;
pub use row_store::{IN_MEMORY, MaskedRows, MaskedRowsWriter, RowSize};
pub use top_k::{TopKFile, TopKHeader, TopKWriter};

/// A tokenized row with its labels. Both lists have the same length.
#[derive(Debug, Clone, PartialEq)]
pub struct MaskedRow {
    /// Token ids.
    pub tokens: Vec<i64>,
    /// For each token its id if it is to be predicted, else −100 ([`IGNORE_INDEX`]). Not shifted: position `t` predicts label
    /// `t + 1`.
    pub labels: Vec<i64>,
    /// 1, or −1 for an undesirable answer ([`Grouping::Rated`]).
    pub weight: f32,
}

impl MaskedRow {
    /// Creates a row with weight 1.
    pub fn new(tokens: Vec<i64>, labels: Vec<i64>) -> Self {
        Self { tokens, labels, weight: 1.0 }
    }

    /// Returns the tokens before the first label.
    pub fn prompt(&self) -> &[i64] {
        let is_label = |label: &i64| *label != IGNORE_INDEX;
        &self.tokens[..self.labels.iter().position(is_label).unwrap_or(self.labels.len())]
    }
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
    /// Batches that divide their rows among themselves by falling length: those of an optimizer step. 1 keeps the order; packed rows
    /// have one length and keep it too.
    pub by_length: usize,
    /// Number of epochs; `None` for no end.
    pub epochs: Option<u64>,
    /// Which rows belong together.
    pub grouping: Grouping,
}

/// Batches of an evaluation that divide their rows by length. Sorting all of the rows would hold their lengths in memory.
const EVALUATED_BY_LENGTH: usize = 64;

impl Layout {
    /// The same batches in the rows' order, once, but for rows of 64 batches that are sorted by length together. Its loss is a sum
    /// over all rows, whatever their order.
    pub fn of_evaluation(self) -> Self {
        Self { shuffle: None, by_length: EVALUATED_BY_LENGTH, epochs: Some(1), ..self }
    }
}

impl Default for Layout {
    fn default() -> Self {
        Self {
            batch: 1,
            packed: None,
            pad: 0,
            shuffle: None,
            by_length: 1,
            epochs: None,
            grouping: Grouping::Rows,
        }
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
    rows: MaskedRows,
    /// The log-probabilities of rows by a reference model ([`MaskedBatches::with_reference`]).
    reference: Option<Arc<[f32]>>,
    /// A teacher's most probable tokens at the labels of rows ([`MaskedBatches::with_top_k`]).
    top_k: Option<Arc<TopKFile>>,
    /// Which groups of rows share one row of a batch; `None` if each row has its own.
    together: Option<Arc<Assignment>>,
    layout: Layout,
    device: Device,
    /// Of the rows alone.
    content: Fingerprint,
    fingerprint: u64,
    /// Positions of all rows.
    tokens: usize,
    /// Tokens of the longest row.
    longest: usize,
    /// The index of the next batch, over all epochs.
    position: u64,
}

const WHAT: &str = "training rows";

fn refuse(reason: String) -> Error {
    Error::config(WHAT, reason)
}

/// The number of positions of a row.
fn positions(row: &MaskedRow) -> usize {
    row.tokens.len() - 1
}

/// The same of its size: tokens that predict a next one.
fn positions_of(size: RowSize) -> usize {
    size.tokens.saturating_sub(1)
}

impl MaskedBatches {
    /// Creates a source at the first batch over rows in memory. Rows without a label are left out.
    ///
    /// # Errors
    /// Errors of [`MaskedRowsWriter::push`] and of [`over`](Self::over).
    pub fn new(rows: Vec<MaskedRow>, layout: Layout, device: Device) -> Result<Self> {
        Self::over(&MaskedRows::of(&rows)?, layout, device)
    }

    /// Creates a source at the first batch over stored rows. Rows without a label are left out, with those that they belong to.
    ///
    /// # Errors
    /// No row with a label; a batch size of 0; a row longer than a packed row; rows that make no whole number of groups; a file that cannot be read.
    pub fn over(rows: &MaskedRows, layout: Layout, device: Device) -> Result<Self> {
        let together = layout.grouping.rows();
        if !rows.len().is_multiple_of(together) {
            return Err(refuse(format!("{} rows in groups of {together}", rows.len())));
        }
        let mut silent = Vec::new();
        for first in (0..rows.len()).step_by(together) {
            let group = first..first + together;
            let learned = group.clone().map(|row| Ok(rows.size(row)?.learned)).collect::<Result<Vec<_>>>()?;
            if learned.contains(&0) {
                silent.extend(group.map(|row| row as u32));
            }
        }
        let rows = if silent.is_empty() { rows.clone() } else { rows.divide(&silent).0 };
        if rows.is_empty() || layout.batch == 0 {
            let (count, batch) = (rows.len(), layout.batch);
            return Err(refuse(format!(
                "{count} rows with labels, in batches of {batch}; expected at least 1 of both"
            )));
        }
        let together = layout.packed.map(|capacity| packed(&rows, layout.grouping, capacity)).transpose()?;
        let together = together.map(Arc::new);
        let (mut content, mut tokens, mut longest) = (Fingerprint::new("masked rows"), 0, 0);
        for row in rows.iter() {
            let row = row?;
            for numbers in [&row.tokens, &row.labels] {
                content = content.numbers(numbers.iter().map(|number| number.cast_unsigned()));
            }
            if layout.grouping == Grouping::Rated {
                content = content.number(u64::from(row.weight.to_bits()));
            }
            (tokens, longest) = (tokens + row.tokens.len() - 1, longest.max(row.tokens.len()));
        }
        let fingerprint = of_layout(content, &layout);
        Ok(Self {
            rows,
            reference: None,
            top_k: None,
            together,
            layout,
            device,
            content,
            fingerprint,
            tokens,
            longest,
            position: 0,
        })
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
        if batch == 0 {
            return Err(refuse("batches of 0 rows; expected at least 1".to_owned()));
        }
        let layout = Layout { batch, ..self.layout };
        Ok(Self { fingerprint: of_layout(self.content, &layout), layout, position: 0, ..self })
    }

    /// Returns a source of the same batches that have the log-probability of each row's labels by a reference model, in the rows' order; of
    /// rated rows each is followed by that of the row's prompt with the other answer.
    ///
    /// # Errors
    /// Another number of them than that.
    pub fn with_reference(self, log_probabilities: Arc<[f32]>) -> Result<Self> {
        if log_probabilities.len() != self.rows.len() * self.layout.grouping.references() {
            let (given, rows) = (log_probabilities.len(), self.rows.len());
            return Err(refuse(format!("{given} log-probabilities of a reference model for {rows} rows")));
        }
        Ok(Self { reference: Some(log_probabilities), ..self })
    }

    /// Returns the positions of the longest row, also where rows are packed.
    pub fn longest(&self) -> usize {
        self.longest.saturating_sub(1)
    }

    /// Returns the number of examples of an epoch: rows, or pairs.
    pub fn examples(&self) -> usize {
        self.rows.len() / self.layout.grouping.rows()
    }

    /// Returns a source of all rows once, in their order and not packed, at the first batch.
    #[must_use]
    pub fn in_row_order(&self) -> Self {
        let layout = Layout { packed: None, shuffle: None, by_length: 1, epochs: Some(1), ..self.layout };
        let fingerprint = of_layout(self.content, &layout);
        Self { together: None, fingerprint, layout, position: 0, ..self.clone() }
    }

    /// Returns a number that other rows do not have, in any layout.
    pub fn content(&self) -> u64 {
        self.content.finish()
    }

    /// Returns whether rows are packed.
    pub fn is_packed(&self) -> bool {
        self.layout.packed.is_some()
    }

    /// Packed rows, or groups of rows, in an epoch.
    fn units(&self) -> usize {
        self.together.as_ref().map_or(self.examples(), |together| together.offsets.len() - 1)
    }

    /// The numbers of the rows of a unit.
    fn unit(&self, number: usize) -> impl Iterator<Item = usize> + '_ {
        let (from, to) = match &self.together {
            None => (number, number + 1),
            Some(together) => (together.offsets[number] as usize, together.offsets[number + 1] as usize),
        };
        let rows = self.layout.grouping.rows();
        // No group is split, so a piece's number is its group's.
        let group = |at: usize| self.together.as_ref().map_or(at, |together| together.pieces[at] as usize);
        (from..to).flat_map(move |at| (0..rows).map(move |row| group(at) * rows + row))
    }

    /// The rows of a batch that a unit takes.
    fn rows_of_unit(&self) -> usize {
        if self.is_packed() { 1 } else { self.layout.grouping.rows() }
    }

    /// Returns the batches per epoch; the last one may have fewer rows.
    pub fn batches_per_epoch(&self) -> u64 {
        self.units().div_ceil(self.layout.batch) as u64
    }

    /// Returns the tokens of an epoch, and its padding positions if rows are packed.
    pub fn tokens_and_padding(&self) -> (usize, usize) {
        let padding = self.layout.packed.map_or(0, |capacity| capacity * self.units() - self.tokens);
        (self.tokens, padding)
    }

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

    /// Returns sizes that no batch exceeds: the length of the longest row, and as many labels as the rows with the most labels have.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn largest_shape(&self) -> Result<BatchShape> {
        let (mut labels, mut widest) = (Greatest::new(self.layout.batch), 0);
        for number in 0..self.units() {
            let (width, learned) = self.size_of(number)?;
            labels.add(learned);
            widest = widest.max(width);
        }
        Ok(BatchShape {
            rows: self.layout.batch.min(self.units()) * self.rows_of_unit(),
            length: self.layout.packed.unwrap_or(widest),
            labelled: labels.falling().into_iter().sum(),
        })
    }

    /// Returns the positions and the labels of a unit: of its longest row, unless its rows are packed.
    fn size_of(&self, unit: usize) -> Result<(usize, usize)> {
        self.unit(unit).try_fold((0, 0), |(width, labels), row| {
            let size = self.rows.size(row)?;
            let positions = positions_of(size);
            let learned = if self.layout.grouping.learns_prompt(row) { positions } else { size.learned };
            let width = if self.is_packed() { width + positions } else { width.max(positions) };
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
            let (mut widest, mut labelled) = (0, 0);
            for number in &numbers {
                match self.size_of(*number) {
                    Ok((width, labels)) => (widest, labelled) = (widest.max(width), labelled + labels),
                    Err(error) => return Some(Err(error)),
                }
            }
            let length = self.layout.packed.unwrap_or(widest);
            Some(Ok(BatchShape { rows: numbers.len() * self.rows_of_unit(), length, labelled }))
        })
    }

    /// The units of the batch at a position; `None` after the last epoch.
    fn numbers(&self, position: u64) -> Result<Option<Vec<usize>>> {
        let together = self.layout.by_length as u64;
        if together <= 1 || self.is_packed() {
            return Ok(self.in_order(position));
        }
        let first = position - position % together;
        let batches: Vec<_> =
            (first..first + together).map_while(|position| self.in_order(position)).collect();
        let at = (position - first) as usize;
        let Some(rows) = batches.get(at).map(Vec::len) else { return Ok(None) };
        let before: usize = batches[..at].iter().map(Vec::len).sum();
        let mut units = batches
            .concat()
            .into_iter()
            .map(|unit| Ok((Reverse(self.size_of(unit)?.0), unit)))
            .collect::<Result<Vec<_>>>()?;
        units.sort_by_key(|(length, _)| *length);
        Ok(Some(units[before..before + rows].iter().map(|(_, unit)| *unit).collect()))
    }

    /// The units of the batch at a position, in the epoch's order; `None` after the last epoch.
    fn in_order(&self, position: u64) -> Option<Vec<usize>> {
        let (per_epoch, units) = (self.batches_per_epoch(), self.units() as u64);
        let (epoch, number) = (position / per_epoch, position % per_epoch);
        if self.layout.epochs.is_some_and(|epochs| epoch >= epochs) {
            return None;
        }
        let order = self.layout.shuffle.map(|seed| Permutation::new(units, seed, epoch, 0));
        let first = number * self.layout.batch as u64;
        let numbers = first..units.min(first + self.layout.batch as u64);
        Some(numbers.map(|number| order.as_ref().map_or(number, |order| order.at(number)) as usize).collect())
    }
}

/// The fingerprint of rows in a layout.
fn of_layout(content: Fingerprint, layout: &Layout) -> u64 {
    let (packed, seed) = (layout.packed.unwrap_or(0) as u64, layout.shuffle.unwrap_or(0));
    let numbers = [layout.batch as u64, packed, seed, layout.by_length as u64];
    // Other objectives over the same rows have other batches.
    let pairs = match layout.grouping {
        Grouping::Rows => None,
        Grouping::Pairs { learn_prompts } => Some(1 + u64::from(learn_prompts)),
        Grouping::Rated => Some(3),
    };
    numbers.into_iter().chain(pairs).fold(content, Fingerprint::number).finish()
}

/// Decides which groups of rows share a packed row.
fn packed(rows: &MaskedRows, grouping: Grouping, capacity: usize) -> Result<Assignment> {
    let mut lengths = Vec::with_capacity(rows.len() / grouping.rows());
    for first in (0..rows.len()).step_by(grouping.rows()) {
        let mut positions = 0;
        for row in first..first + grouping.rows() {
            positions += positions_of(rows.size(row)?);
        }
        if positions > capacity {
            let (what, number) = match grouping {
                Grouping::Rows | Grouping::Rated => ("row", first),
                Grouping::Pairs { .. } => ("pair", first / 2),
            };
            return Err(refuse(format!(
                "{what} {number} has {positions} positions, but packed rows have {capacity}; use longer packed rows, or leave such {what}s out"
            )));
        }
        lengths.push(positions as u32);
    }
    let options = PackingConfig { capacity, algorithm: Algorithm::default(), long: LongDocuments::Drop };
    Ok(PackingPlan::new(&lengths, &options)?.assignment())
}

impl Batches for MaskedBatches {
    fn next(&mut self) -> Result<Option<Batch>> {
        let Some(numbers) = self.numbers(self.position)? else { return Ok(None) };
        let batch = self.batch(&numbers)?;
        self.position += 1;
        Ok(Some(batch))
    }

    fn state(&self) -> Value {
        json!({ "rows": format!("{:016x}", self.fingerprint), "position": self.position })
    }

    fn resume(&mut self, state: &Value) -> Result<()> {
        let fingerprint = format!("{:016x}", self.fingerprint);
        match state["position"].as_u64().filter(|_| state["rows"] == *fingerprint) {
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
