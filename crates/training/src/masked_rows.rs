//! Fine-tuning batches: tokenized rows with a loss mask, padded, end to end, or packed.
//!
//! A row of n tokens has n − 1 positions; each predicts the next token if its label is set. [`Arrangement`] says how the rows of a batch lie:
//! padded on the right to the longest; end to end in one row without padding; or packed best-fit decreasing ([`dataloading::packing`]) into
//! rows of one length. Rows never attend to each other, so that all three have the same loss and gradients up to the order of sums. Each
//! epoch's order is a permutation given by the seed, so the state of the source is one number.
//! The batches of one optimizer step divide its rows by length ([`Layout::by_length`]): padded rows so that each batch has rows of like length
//! and little padding, rows without padding so that the batches have about as many positions each. The step has the same rows. (Transformers'
//! `group_by_length` sorts beyond the step, and so changes which rows share one.)
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

mod arrangement;
mod batch;
mod byte_store;
mod grouping;
mod mismatched;
mod mixture;
mod order;
mod row_store;
mod sizes;
mod top_k;
mod weights;

use std::sync::Arc;

use dataloading::fingerprint::Fingerprint;
use dataloading::packing::Assignment;
use dataloading::{Batch, IGNORE_INDEX};
use serde_json::{Value, json};
use tch::Device;

use crate::batches::Batches;
use crate::error::{Error, Result};

pub use arrangement::Arrangement;
pub(crate) use batch::{Item, assemble};
pub use grouping::Grouping;
pub use mixture::Mixture;
use order::packed;
pub use row_store::{IN_MEMORY, MaskedRows, MaskedRowsWriter, RowSize};
pub use sizes::BatchShape;
use sizes::positions;
pub use top_k::{TopKFile, TopKHeader, TopKWriter};

/// A tokenized row with its labels. Both lists have the same length.
#[derive(Debug, Clone, PartialEq)]
pub struct MaskedRow {
    /// Token ids.
    pub tokens: Vec<i64>,
    /// For each token its id if it is to be predicted, else −100 ([`IGNORE_INDEX`]). Not shifted: position `t` predicts label
    /// `t + 1`.
    pub labels: Vec<i64>,
    /// The weight of its example in the loss ([`dataloading::ExampleWeights`]), negative for an undesirable answer ([`Grouping::Rated`]).
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
    /// How they lie.
    pub arrangement: Arrangement,
    /// The padding token.
    pub pad: i64,
    /// The seed of the epochs' orders; `None` keeps the order of the rows.
    pub shuffle: Option<u64>,
    /// Batches that divide their rows among themselves by length: those of an optimizer step. 1 keeps the order; packed rows have one length
    /// and keep it too.
    pub by_length: usize,
    /// Number of epochs; `None` for no end.
    pub epochs: Option<u64>,
    /// Which rows belong together.
    pub grouping: Grouping,
}

/// Batches of an evaluation that divide their rows by length. Sorting all of the rows would hold their lengths in memory.
const EVALUATED_BY_LENGTH: usize = 64;

impl Layout {
    /// The same batches in the rows' order, once, but for padded rows of 64 batches that are sorted by length together. Its loss is a sum
    /// over all rows, whatever their order.
    pub fn of_evaluation(self) -> Self {
        let by_length = if self.arrangement == Arrangement::Padded { EVALUATED_BY_LENGTH } else { 1 };
        Self { shuffle: None, by_length, epochs: Some(1), ..self }
    }
}

impl Default for Layout {
    fn default() -> Self {
        Self {
            batch: 1,
            arrangement: Arrangement::Padded,
            pad: 0,
            shuffle: None,
            by_length: 1,
            epochs: None,
            grouping: Grouping::Rows,
        }
    }
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
    /// The first unit of each source, and the number of units.
    sources: Arc<[usize]>,
    mixture: Option<Mixture>,
    layout: Layout,
    device: Device,
    /// Of the rows alone.
    content: Fingerprint,
    fingerprint: u64,
    /// Positions of all rows.
    tokens: usize,
    /// The same of each source.
    tokens_of_sources: Arc<[usize]>,
    /// Tokens of the longest row.
    longest: usize,
    /// Whether any row has another weight than 1.
    has_weights: bool,
    /// The index of the next batch, over all epochs.
    position: u64,
}

const WHAT: &str = "training rows";

fn refuse(reason: String) -> Error {
    Error::config(WHAT, reason)
}

impl MaskedBatches {
    /// Creates a source at the first batch over rows in memory. Rows without a label, or with the weight 0, are left out.
    ///
    /// # Errors
    /// Errors of [`MaskedRowsWriter::push`] and of [`over`](Self::over).
    pub fn new(rows: Vec<MaskedRow>, layout: Layout, device: Device) -> Result<Self> {
        Self::over(&MaskedRows::of(&rows)?, layout, device)
    }

    /// Creates a source at the first batch over stored rows. Rows without a label, or with the weight 0, are left out, with those
    /// that they belong to.
    ///
    /// # Errors
    /// No row with a label; a batch size of 0; a row longer than a packed row; rows that make no whole number of groups; a file that cannot be read.
    pub fn over(rows: &MaskedRows, layout: Layout, device: Device) -> Result<Self> {
        let together = layout.grouping.rows();
        if let Some(rows) = rows.sources().find(|rows| !rows.is_multiple_of(together)) {
            return Err(refuse(format!("{rows} rows in groups of {together}")));
        }
        let mut silent = Vec::new();
        for first in (0..rows.len()).step_by(together) {
            let group = first..first + together;
            let is_silent = |row| Ok(rows.size(row)?.learned == 0 || rows.weight(row)? == 0.0);
            let silence = group.clone().map(is_silent).collect::<Result<Vec<_>>>()?;
            if silence.contains(&true) {
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
        let (together, sources) = packed(&rows, &layout)?;
        let (mut content, mut tokens, mut longest) = (Fingerprint::new("masked rows"), 0, 0);
        let (mut weights, mut has_weights) = (Fingerprint::new("weights"), false);
        let (mut all, mut tokens_of_sources) = (rows.iter(), Vec::new());
        for count in rows.sources() {
            let before = tokens;
            for row in all.by_ref().take(count) {
                let row = row?;
                for numbers in [&row.tokens, &row.labels] {
                    content = content.numbers(numbers.iter().map(|number| number.cast_unsigned()));
                }
                if layout.grouping == Grouping::Rated {
                    content = content.number(u64::from(row.weight.to_bits()));
                }
                has_weights |= row.weight.abs() != 1.0;
                weights = weights.number(u64::from(row.weight.to_bits()));
                (tokens, longest) = (tokens + row.tokens.len() - 1, longest.max(row.tokens.len()));
            }
            tokens_of_sources.push(tokens - before);
        }
        drop(all);
        if has_weights {
            content = content.number(weights.finish());
        }
        let fingerprint = of_layout(content, &layout, None);
        Ok(Self {
            rows,
            reference: None,
            top_k: None,
            together: together.map(Arc::new),
            sources: sources.into(),
            mixture: None,
            layout,
            device,
            content,
            fingerprint,
            tokens,
            tokens_of_sources: tokens_of_sources.into(),
            longest,
            has_weights,
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
        let fingerprint = of_layout(self.content, &layout, self.mixture.as_ref());
        Ok(Self { fingerprint, layout, position: 0, ..self })
    }

    /// Returns a source whose batches mix the sources of the rows ([`MaskedRows::join`]) by weight, at the first batch. An epoch has as many
    /// rows as without, and goes on in each source where the one before has stopped. With packing, it is packed rows that are mixed, each of
    /// one source.
    ///
    /// # Errors
    /// Another number of sources; a source without a row to learn from.
    pub fn with_mixture(self, mixture: Mixture) -> Result<Self> {
        let (weights, sources) = (mixture.sources(), self.sources.len() - 1);
        if weights != sources {
            return Err(refuse(format!("{weights} weights of a mixture for {sources} sources")));
        }
        if let Some(empty) = (0..sources).find(|source| self.units_of(*source) == 0) {
            return Err(refuse(format!(
                "source {empty} of the mixture has no row to learn from; leave it out"
            )));
        }
        let fingerprint = of_layout(self.content, &self.layout, Some(&mixture));
        Ok(Self { fingerprint, mixture: Some(mixture), position: 0, ..self })
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
        let arrangement = match self.layout.arrangement {
            Arrangement::Packed(_) => Arrangement::Padded,
            other => other,
        };
        let layout = Layout { arrangement, shuffle: None, by_length: 1, epochs: Some(1), ..self.layout };
        let fingerprint = of_layout(self.content, &layout, None);
        let whole = self.clone();
        let sources = order::units_of_groups(&self.rows, layout.grouping).into();
        Self { together: None, sources, mixture: None, fingerprint, layout, position: 0, ..whole }
    }

    /// Returns a number that other rows do not have, in any layout.
    pub fn content(&self) -> u64 {
        self.content.finish()
    }

    /// Returns whether rows are packed.
    fn is_packed(&self) -> bool {
        matches!(self.layout.arrangement, Arrangement::Packed(_))
    }

    /// Returns whether a row of a batch may hold several documents.
    pub fn holds_documents(&self) -> bool {
        self.layout.arrangement != Arrangement::Padded
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

    /// The rows that a unit takes: packed rows, or rows of the data.
    fn rows_of_unit(&self) -> usize {
        if self.is_packed() { 1 } else { self.layout.grouping.rows() }
    }

    /// Returns the batches per epoch; the last one may have fewer rows.
    pub fn batches_per_epoch(&self) -> u64 {
        self.units().div_ceil(self.layout.batch) as u64
    }

    /// Returns the tokens of an epoch, and its padding positions if rows are packed; those of a mixture as its weights have them in the mean.
    pub fn tokens_and_padding(&self) -> (usize, usize) {
        let tokens = self.tokens_of_epoch();
        let padding = match self.layout.arrangement {
            Arrangement::Packed(capacity) => (capacity * self.units()).saturating_sub(tokens),
            _ => 0,
        };
        (tokens, padding)
    }
}

/// The fingerprint of rows in a layout.
fn of_layout(content: Fingerprint, layout: &Layout, mixture: Option<&Mixture>) -> u64 {
    let seed = layout.shuffle.unwrap_or(0);
    let numbers = [layout.batch as u64, layout.arrangement.number(), seed, layout.by_length as u64];
    // Other objectives over the same rows have other batches.
    let pairs = match layout.grouping {
        Grouping::Rows => None,
        Grouping::Pairs { learn_prompts } => Some(1 + u64::from(learn_prompts)),
        Grouping::Rated => Some(3),
    };
    let shares = mixture.iter().flat_map(|mixture| mixture.period().1).map(|count| u64::from(*count));
    numbers.into_iter().chain(pairs).chain(shares).fold(content, Fingerprint::number).finish()
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
                     data, prompts, batch size, packing, padding (earlier releases padded: `data.padding_free = false`) and seed"
                        .to_owned(),
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
