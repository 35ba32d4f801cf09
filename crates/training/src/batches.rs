//! Sources of batches.

use dataloading::{Batch, Counts, IGNORE_INDEX};
use serde_json::{Value, json};
use tch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::policy::Prompt;
use crate::split_mix::split_mix;

/// A source of batches that can save and restore its position.
pub trait Batches: Send {
    /// Returns the next batch, on the model's device; `None` at the end of the data. (A source with several epochs ends after
    /// the last.)
    ///
    /// # Errors
    /// An invalid record, with its location.
    fn next(&mut self) -> Result<Option<Batch>>;

    /// Returns the prompts of the next step, for an objective over rewards.
    ///
    /// # Errors
    /// A source of something else.
    fn prompts(&mut self) -> Result<Vec<Prompt>> {
        Err(Error::config(
            "objective",
            "rewards are learned from answers to prompts, and the data are no source of prompts",
        ))
    }

    /// Returns the position: that of the batch that [`Batches::next`] returns next.
    fn state(&self) -> Value;

    /// Restores a position from [`Batches::state`].
    ///
    /// # Errors
    /// A state of another source, or of other data.
    fn resume(&mut self, state: &Value) -> Result<()>;
}

/// Batches of a synthetic language, for tests and demonstrations: each token is the one before it times 5 plus 1, plus a random
/// number from 0 to `noise`, modulo the vocabulary. The minimal loss is ln(noise + 1) nats.
///
/// A batch is a function of the seed and its number, so the state is one integer.
#[derive(Debug, Clone)]
pub struct Synthetic {
    /// Seed of all batches.
    pub seed: u64,
    /// Size of the vocabulary.
    pub vocabulary: i64,
    /// Rows per batch.
    pub rows: usize,
    /// Maximum tokens per row; rows have between half and all of it, and are padded with 0.
    pub length: usize,
    /// The largest random number.
    pub noise: u64,
    /// Number of batches; `None` for no end.
    pub batches: Option<u64>,
    /// The device of the tensors.
    pub device: Device,
    /// The next batch's number.
    pub position: u64,
}

impl Batches for Synthetic {
    fn next(&mut self) -> Result<Option<Batch>> {
        if self.batches.is_some_and(|batches| self.position >= batches) {
            return Ok(None);
        }
        if self.vocabulary < 1 || self.rows == 0 || self.length < 2 {
            let reason = format!(
                "vocabulary {}, {} rows of {} tokens; expected a vocabulary and rows of at least 1, and at least 2 tokens",
                self.vocabulary, self.rows, self.length
            );
            return Err(Error::config("synthetic data", reason));
        }
        let (seed, mut drawn) = (self.seed ^ self.position.wrapping_mul(0x9e37_79b9_7f4a_7c15), 0);
        let mut below = |end: u64| {
            drawn += 1;
            split_mix(seed, drawn) % end.max(1)
        };
        self.position += 1;
        let size = self.rows * self.length;
        let (mut tokens, mut labels) = (vec![0i64; size], vec![IGNORE_INDEX; size]);
        let mut counts = Counts { documents: self.rows, ..Counts::default() };
        let mut padding = Vec::new();
        for row in 0..self.rows {
            let length = self.length - below(self.length as u64 / 2) as usize;
            let start = row * self.length;
            tokens[start] = below(self.vocabulary as u64) as i64;
            for at in start + 1..start + length {
                let step = 1 + below(self.noise + 1) as i64;
                tokens[at] = (tokens[at - 1].wrapping_mul(5).wrapping_add(step)).rem_euclid(self.vocabulary);
                labels[at - 1] = tokens[at];
            }
            counts.tokens += length;
            counts.padding += self.length - length;
            padding.push((self.length - length) as i64);
            counts.targets += length - 1;
        }
        let shape = [self.rows as i64, self.length as i64];
        let tensor = |values: &[i64]| -> Result<Tensor> {
            Ok(Tensor::f_from_slice(values)?.f_reshape(shape)?.f_to_device(self.device)?)
        };
        Ok(Some(Batch {
            tokens: tensor(&tokens)?,
            labels: tensor(&labels)?,
            packing: None,
            padding,
            sequences: None,
            taught: None,
            weights: None,
            counts,
        }))
    }

    fn state(&self) -> Value {
        json!({ "source": "synthetic", "seed": self.seed, "position": self.position })
    }

    fn resume(&mut self, state: &Value) -> Result<()> {
        let same = state["source"] == "synthetic" && state["seed"] == self.seed;
        match state["position"].as_u64().filter(|_| same) {
            Some(position) => self.position = position,
            None => {
                let reason =
                    format!("the position {state} does not belong to synthetic data with seed {}", self.seed);
                return Err(Error::config("synthetic data", reason));
            }
        }
        Ok(())
    }
}
