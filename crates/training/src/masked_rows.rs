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

/// A source of batches over masked rows. See the [module](self).
#[derive(Debug)]
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
        let (per_epoch, units) = (self.batches_per_epoch(), self.together.len() as u64);
        let (epoch, number) = (self.position / per_epoch, self.position % per_epoch);
        if self.layout.epochs.is_some_and(|epochs| epoch >= epochs) {
            return Ok(None);
        }
        let order = self.layout.shuffle.map(|seed| Permutation::new(units, seed, epoch, 0));
        let first = number * self.layout.batch as u64;
        let numbers = first..units.min(first + self.layout.batch as u64);
        let rows: Vec<&[usize]> = numbers
            .map(|number| order.as_ref().map_or(number, |order| order.at(number)))
            .map(|number| self.together[number as usize].as_slice())
            .collect();
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
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn row(first: i64, prompt: usize, answer: usize) -> MaskedRow {
        let tokens: Vec<i64> = (first..).take(prompt + answer).collect();
        let labels =
            (0..).zip(&tokens).map(|(at, id)| if at < prompt { IGNORE_INDEX } else { *id }).collect();
        MaskedRow { tokens, labels }
    }

    fn rows() -> Vec<MaskedRow> {
        (0..9)
            .map(|number| row(100 * (number + 1), 2 + number as usize % 4, 1 + number as usize % 3))
            .collect()
    }

    const PADDED: Layout = Layout { batch: 4, packed: None, pad: 7, shuffle: Some(3), epochs: Some(2) };

    fn numbers(tensor: &Tensor) -> Vec<Vec<i64>> {
        Vec::try_from(tensor).unwrap()
    }

    /// The next token of each document token, over all remaining batches.
    fn pairs(source: &mut MaskedBatches) -> BTreeMap<(i64, i64), usize> {
        let mut pairs = BTreeMap::new();
        while let Some(batch) = source.next().unwrap() {
            let (tokens, labels) = (numbers(&batch.tokens), numbers(&batch.labels));
            let all: Vec<(i64, i64)> =
                tokens.concat().into_iter().zip(labels.concat()).filter(|(token, _)| *token != 7).collect();
            assert_eq!(all.len(), batch.counts.tokens);
            assert_eq!(tokens.concat().len(), batch.counts.tokens + batch.counts.padding);
            assert_eq!(all.iter().filter(|(_, label)| *label != IGNORE_INDEX).count(), batch.counts.targets);
            all.into_iter().for_each(|pair| *pairs.entry(pair).or_default() += 1);
        }
        pairs
    }

    #[test]
    fn every_answer_is_predicted_once_an_epoch_padded_and_packed() {
        let mut expected = BTreeMap::new();
        for row in rows() {
            for at in 1..row.tokens.len() {
                expected.insert((row.tokens[at - 1], row.labels[at]), 2);
            }
        }
        for layout in [PADDED, Layout { packed: Some(9), ..PADDED }, Layout { shuffle: None, ..PADDED }] {
            let mut source = MaskedBatches::new(rows(), layout, Device::Cpu).unwrap();
            assert_eq!(pairs(&mut source), expected, "{layout:?}");
        }
    }

    #[test]
    fn packed_rows_have_document_boundaries() {
        let layout = Layout { packed: Some(9), shuffle: None, batch: 100, ..PADDED };
        let mut source = MaskedBatches::new(rows(), layout, Device::Cpu).unwrap();
        assert!(source.together.len() < 6, "{:?}", source.together);
        let batch = source.next().unwrap().unwrap();
        let packing = batch.packing.unwrap();
        let (tokens, positions) = (numbers(&batch.tokens).concat(), numbers(&packing.positions).concat());
        for ends in packing.starts.windows(2) {
            let document = ends[0] as usize..ends[1] as usize;
            assert!(positions[document.clone()].iter().copied().eq(0..document.len() as i64));
            let tokens = &tokens[document];
            assert!(tokens[0] == 7 || tokens[0] % 100 == 0, "{tokens:?} does not begin a row");
        }
        assert_eq!(source.tokens_and_padding(), (batch.counts.tokens, batch.counts.padding));
    }

    #[test]
    fn batches_resume_and_epochs_differ() {
        let mut source = MaskedBatches::new(rows(), PADDED, Device::Cpu).unwrap();
        let first = numbers(&source.next().unwrap().unwrap().tokens);
        let (state, rest) = (source.state(), pairs(&mut source));
        let mut other = MaskedBatches::new(rows(), PADDED, Device::Cpu).unwrap();
        other.resume(&state).unwrap();
        assert_eq!(pairs(&mut other), rest);
        other.resume(&json!({ "rows": state["rows"], "position": other.batches_per_epoch() })).unwrap();
        assert_ne!(numbers(&other.next().unwrap().unwrap().tokens), first);
        for layout in [Layout { batch: 3, ..PADDED }, Layout { shuffle: Some(4), ..PADDED }] {
            let mut other = MaskedBatches::new(rows(), layout, Device::Cpu).unwrap();
            assert!(other.resume(&state).unwrap_err().to_string().contains("same data"), "{layout:?}");
        }
    }

    #[test]
    fn options_without_batches_are_refused() {
        let silent = vec![row(1, 3, 0)];
        assert!(MaskedBatches::new(silent, PADDED, Device::Cpu).is_err());
        assert!(MaskedBatches::new(rows(), Layout { batch: 0, ..PADDED }, Device::Cpu).is_err());
        let error =
            MaskedBatches::new(rows(), Layout { packed: Some(4), ..PADDED }, Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("packed rows have 4"), "{error}");
    }
}
