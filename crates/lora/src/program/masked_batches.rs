//! Batches of rows of which only the answers are learnt.
//!
//! A row of n tokens is read as its first n − 1, and each place predicts the next token where the row's label says so: the last
//! token is nothing to go on from. Rows are padded on the right to the longest of their batch, or packed: best-fit decreasing
//! over all of them ([`dataloading::packing`]) into rows of one length, where none sees another. Each epoch has an order of its
//! own, found from the seed; so where the source stands is one number.

use dataloading::fingerprint::Fingerprint;
use dataloading::packing::{Algorithm, LongDocuments};
use dataloading::permutation::Permutation;
use dataloading::{Batch, Counts, IGNORED, Packing, Plan, PlanOptions};
use lora::gsm8k::TrainingRow;
use models::Documents;
use serde_json::{Value, json};
use tch::{Device, Tensor};
use training::{Batches, Error, Result};

/// How rows become batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Rows of a batch: packed ones, where rows are packed.
    pub(crate) batch: usize,
    /// Places of a packed row; `None` to pad.
    pub(crate) packed: Option<usize>,
    /// What stands where no token does.
    pub(crate) pad: i64,
    /// The seed of every epoch's order; `None` for the order of the rows.
    pub(crate) shuffle: Option<u64>,
    /// How often each row comes; `None` for ever again.
    pub(crate) epochs: Option<u64>,
}

/// The source. See the [module](self).
#[derive(Debug)]
pub(crate) struct MaskedBatches {
    rows: Vec<TrainingRow>,
    /// Numbers of the rows that lie in one row of a batch.
    together: Vec<Vec<usize>>,
    layout: Layout,
    device: Device,
    fingerprint: u64,
    /// The number of the next batch, over all epochs.
    position: u64,
}

const WHAT: &str = "training rows";

fn refuse(reason: String) -> Error {
    Error::Config { what: WHAT, reason }
}

/// Places of a row: tokens that something is predicted from.
fn places(row: &TrainingRow) -> usize {
    row.input_ids.len().saturating_sub(1)
}

impl MaskedBatches {
    /// From the first batch on.
    ///
    /// # Errors
    /// No row with anything to predict; batches of 0 rows; a row that no packed row has places for.
    pub(crate) fn new(mut rows: Vec<TrainingRow>, layout: Layout, device: Device) -> Result<Self> {
        rows.retain(|row| row.labels.iter().skip(1).any(|label| *label != IGNORED));
        if rows.is_empty() || layout.batch == 0 {
            let (count, batch) = (rows.len(), layout.batch);
            return Err(refuse(format!(
                "{count} rows with something to predict, in batches of {batch}; expected 1 or more of both"
            )));
        }
        let together = match layout.packed {
            None => (0..rows.len()).map(|number| vec![number]).collect(),
            Some(capacity) => packed(&rows, capacity)?,
        };
        let mut all = Fingerprint::new("masked rows");
        for row in &rows {
            for numbers in [&row.input_ids, &row.labels] {
                all = all.numbers(numbers.iter().map(|number| number.cast_unsigned()));
            }
        }
        for number in [layout.batch as u64, layout.packed.unwrap_or(0) as u64, layout.shuffle.unwrap_or(0)] {
            all = all.number(number);
        }
        Ok(Self { rows, together, layout, device, fingerprint: all.finish(), position: 0 })
    }

    /// Batches of an epoch; the last one may have fewer rows.
    pub(crate) fn batches_per_epoch(&self) -> u64 {
        self.together.len().div_ceil(self.layout.batch) as u64
    }

    /// Tokens that one epoch reads, and places that pad in it where rows are packed.
    pub(crate) fn tokens_and_padding(&self) -> (usize, usize) {
        let tokens: usize = self.rows.iter().map(places).sum();
        let padding = self.layout.packed.map_or(0, |capacity| capacity * self.together.len() - tokens);
        (tokens, padding)
    }

    fn batch(&self, rows: &[&[usize]]) -> Result<Batch> {
        let width = |row: &&[usize]| row.iter().map(|number| places(&self.rows[*number])).sum::<usize>();
        let length = self.layout.packed.unwrap_or_else(|| rows.iter().map(width).max().unwrap_or(0));
        let mut counts = Counts::default();
        let (mut tokens, mut labels, mut positions, mut lengths) = (vec![], vec![], vec![], vec![]);
        for row in rows {
            let mut documents = Vec::new();
            for number in *row {
                let TrainingRow { input_ids, labels: learnt, .. } = &self.rows[*number];
                let own = input_ids.len() - 1;
                tokens.extend_from_slice(&input_ids[..own]);
                labels.extend_from_slice(&learnt[1..]);
                positions.extend(0..own as i64);
                counts.targets += learnt[1..].iter().filter(|label| **label != IGNORED).count();
                counts.tokens += own;
                counts.documents += 1;
                documents.push(own);
            }
            let rest = length - documents.iter().sum::<usize>();
            if rest > 0 {
                tokens.extend(std::iter::repeat_n(self.layout.pad, rest));
                labels.extend(std::iter::repeat_n(IGNORED, rest));
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

/// Which rows share a packed row.
fn packed(rows: &[TrainingRow], capacity: usize) -> Result<Vec<Vec<usize>>> {
    let lengths: Vec<u32> = rows.iter().map(|row| places(row) as u32).collect();
    if let Some((number, row)) = rows.iter().enumerate().find(|(_, row)| places(row) > capacity) {
        return Err(refuse(format!(
            "row {number} has {} places and packed rows have {capacity}; give longer rows, or leave such problems out",
            places(row)
        )));
    }
    let options = PlanOptions { capacity, algorithm: Algorithm::default(), long: LongDocuments::Drop };
    let assignment = Plan::new(&lengths, &options)?.assignment();
    let row = |ends: &[u32]| {
        let pieces = &assignment.pieces[ends[0] as usize..ends[1] as usize];
        // No row is cut, so that a piece's number is its row's.
        pieces.iter().map(|piece| *piece as usize).collect()
    };
    Ok(assignment.offsets.windows(2).map(row).collect())
}

impl Batches for MaskedBatches {
    fn next(&mut self) -> Result<Option<Batch>> {
        let (per_epoch, units) = (self.batches_per_epoch(), self.together.len() as u64);
        let (epoch, place) = (self.position / per_epoch, self.position % per_epoch);
        if self.layout.epochs.is_some_and(|epochs| epoch >= epochs) {
            return Ok(None);
        }
        let order = self.layout.shuffle.map(|seed| Permutation::new(units, seed, epoch, 0));
        let first = place * self.layout.batch as u64;
        let numbers = first..units.min(first + self.layout.batch as u64);
        let rows: Vec<&[usize]> = numbers
            .map(|place| order.as_ref().map_or(place, |order| order.at(place)))
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

    fn row(first: i64, prompt: usize, answer: usize) -> TrainingRow {
        let input_ids: Vec<i64> = (first..).take(prompt + answer).collect();
        let labels = (0..).zip(&input_ids).map(|(at, id)| if at < prompt { IGNORED } else { *id }).collect();
        TrainingRow { attention_mask: vec![1; input_ids.len()], input_ids, labels }
    }

    fn rows() -> Vec<TrainingRow> {
        (0..9)
            .map(|number| row(100 * (number + 1), 2 + number as usize % 4, 1 + number as usize % 3))
            .collect()
    }

    const PADDED: Layout = Layout { batch: 4, packed: None, pad: 7, shuffle: Some(3), epochs: Some(2) };

    fn numbers(tensor: &Tensor) -> Vec<Vec<i64>> {
        Vec::try_from(tensor).unwrap()
    }

    /// What each token that is a document's predicts, over all batches that are left.
    fn pairs(source: &mut MaskedBatches) -> BTreeMap<(i64, i64), usize> {
        let mut pairs = BTreeMap::new();
        while let Some(batch) = source.next().unwrap() {
            let (tokens, labels) = (numbers(&batch.tokens), numbers(&batch.labels));
            let all: Vec<(i64, i64)> =
                tokens.concat().into_iter().zip(labels.concat()).filter(|(token, _)| *token != 7).collect();
            assert_eq!(all.len(), batch.counts.tokens);
            assert_eq!(tokens.concat().len(), batch.counts.tokens + batch.counts.padding);
            assert_eq!(all.iter().filter(|(_, label)| *label != IGNORED).count(), batch.counts.targets);
            all.into_iter().for_each(|pair| *pairs.entry(pair).or_default() += 1);
        }
        pairs
    }

    #[test]
    fn every_answer_is_predicted_once_an_epoch_padded_and_packed() {
        let mut expected = BTreeMap::new();
        for row in rows() {
            for at in 1..row.input_ids.len() {
                expected.insert((row.input_ids[at - 1], row.labels[at]), 2);
            }
        }
        for layout in [PADDED, Layout { packed: Some(9), ..PADDED }, Layout { shuffle: None, ..PADDED }] {
            let mut source = MaskedBatches::new(rows(), layout, Device::Cpu).unwrap();
            assert_eq!(pairs(&mut source), expected, "{layout:?}");
        }
    }

    #[test]
    fn packed_rows_say_where_their_documents_lie() {
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
    fn it_goes_on_where_it_stood_and_epochs_differ() {
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
    fn what_makes_no_batches_is_refused() {
        let silent = vec![row(1, 3, 0)];
        assert!(MaskedBatches::new(silent, PADDED, Device::Cpu).is_err());
        assert!(MaskedBatches::new(rows(), Layout { batch: 0, ..PADDED }, Device::Cpu).is_err());
        let error =
            MaskedBatches::new(rows(), Layout { packed: Some(4), ..PADDED }, Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("packed rows have 4"), "{error}");
    }
}
