//! The ranks of a training, and whose a micro-batch is.
//!
//! Ranks take micro-batches in turns: with N ranks, micro-batch i is that of rank i mod N. Where C of them divide each row
//! ([sequence parallelism](models::sequence_parallel)), C consecutive ranks take one micro-batch, each its part of every row: rank r is
//! number r mod C of group ⌊r/C⌋, and micro-batch i is that of group i mod N/C.

use models::module::IGNORE_INDEX;
use models::{Documents, SequenceShard};
use runtime::collectives::Group;
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use crate::accumulation::documents;
use crate::error::{Error, Result};

use dataloading::Batch;

/// The ranks of a training. See the [module](self).
#[derive(Debug, Clone)]
pub struct Ranks {
    all: Group,
    sequence: Option<Group>,
}

impl From<Group> for Ranks {
    /// Each rank takes whole rows.
    fn from(all: Group) -> Self {
        Self { all, sequence: None }
    }
}

impl Ranks {
    /// Creates ranks that divide each row within `sequence`: a group of consecutive ranks of `all`, this one among them, whose tensors are where
    /// the parameters are.
    ///
    /// # Errors
    /// A group of other ranks.
    pub fn with_sequence(all: Group, sequence: Group) -> Result<Self> {
        let (size, number) = (sequence.size(), all.rank() % sequence.size());
        if !all.size().is_multiple_of(size) || sequence.rank() != number {
            let reason = format!(
                "rank {} of {} is number {} of the {size} ranks that divide a row; expected number {number}, and a number of ranks that \
                 is a multiple of {size}",
                all.rank(),
                all.size(),
                sequence.rank()
            );
            return Err(Error::config("sequence parallelism", reason));
        }
        Ok(Self { all, sequence: (size > 1).then_some(sequence) })
    }

    /// Returns all ranks.
    pub fn all(&self) -> &Group {
        &self.all
    }

    /// Returns the ranks that divide each row, this one's among them; `None` if each takes whole rows.
    pub fn sequence(&self) -> Option<&Group> {
        self.sequence.as_ref()
    }

    /// Returns the number of micro-batches that are computed at a time.
    pub fn turns(&self) -> usize {
        self.all.size() / self.parts()
    }

    /// Returns among how many ranks each row is divided.
    pub(crate) fn parts(&self) -> usize {
        self.sequence.as_ref().map_or(1, Group::size)
    }

    /// Returns this rank's number among those that divide a row.
    pub(crate) fn part(&self) -> usize {
        self.sequence.as_ref().map_or(0, Group::rank)
    }

    /// Whether micro-batch `number` is this rank's.
    pub(crate) fn takes(&self, number: usize) -> bool {
        number % self.turns() == self.all.rank() / self.parts()
    }

    /// Whether this rank has no micro-batch in the last round, if the last one is number `last`.
    pub(crate) fn idles(&self, last: usize) -> bool {
        self.all.rank() / self.parts() > last % self.turns()
    }
}

/// What a rank computes of a micro-batch.
#[derive(Debug)]
pub(crate) struct BatchPart {
    pub(crate) tokens: Tensor,
    pub(crate) labels: Tensor,
    /// [`ExampleWeights::positions`](dataloading::ExampleWeights).
    pub(crate) weights: Option<Tensor>,
    /// The strength of the embeddings' noise.
    pub(crate) noise: Option<Tensor>,
    pub(crate) positions: Option<Tensor>,
    /// Of whole rows.
    pub(crate) documents: Option<Documents>,
    /// `None` for whole rows.
    pub(crate) shard: Option<SequenceShard>,
}

impl BatchPart {
    /// All of a batch.
    pub(crate) fn whole(batch: &Batch, noise: Option<Tensor>) -> Result<Self> {
        Ok(Self {
            tokens: batch.tokens.shallow_clone(),
            labels: batch.labels.shallow_clone(),
            weights: batch.weights.as_ref().map(|weights| weights.positions.shallow_clone()),
            noise,
            positions: batch.packing.as_ref().map(|packing| packing.positions.shallow_clone()),
            documents: documents(batch)?,
            shard: None,
        })
    }

    /// The part of this rank among those that divide each row. Rows get padding at their end, so that the parts are equal.
    pub(crate) fn of(batch: &Batch, noise: Option<Tensor>, ranks: &Group) -> Result<Self> {
        let (rows, tokens) = batch.tokens.size2()?;
        let length = (tokens as u64).next_multiple_of(ranks.size() as u64) as i64;
        let (shard, padding) = (SequenceShard::new(ranks, length)?, length - tokens);
        let range = shard.range();
        let part = range.end - range.start;
        let cut = |whole: &Tensor, fill: i64| -> Result<Tensor> {
            let padded = match padding {
                0 => whole.shallow_clone(),
                _ => whole.f_pad([0, padding], "constant", fill as f64)?,
            };
            Ok(padded.f_narrow(1, range.start, part)?.f_contiguous()?)
        };
        let positions = match &batch.packing {
            Some(packing) => cut(&packing.positions, 0)?,
            None => {
                // Padding gets the last position, which the model has.
                let options = (Kind::Int64, batch.tokens.device());
                let of_row =
                    Tensor::try_arange_start(range.start, range.end, options)?.try_clamp_max(tokens - 1)?;
                of_row.f_unsqueeze(0)?.f_expand([rows, part], false)?.f_contiguous()?
            }
        };
        let documents = match &batch.packing {
            Some(packing) if padding > 0 => {
                let lengths = lengths(&packing.starts, (tokens, padding));
                Some(Documents::new(&lengths, batch.tokens.device())?)
            }
            _ => documents(batch)?,
        };
        Ok(Self {
            tokens: cut(&batch.tokens, 0)?,
            labels: cut(&batch.labels, IGNORE_INDEX)?,
            weights: batch.weights.as_ref().map(|weights| cut(&weights.positions, 0)).transpose()?,
            noise: noise.map(|noise| cut(&noise, 0)).transpose()?,
            positions: Some(positions),
            documents,
            shard: Some(shard),
        })
    }
}

/// Returns the lengths of each row's documents, with one more of `padding` tokens, of documents that begin at `starts` in rows of `tokens`.
fn lengths(starts: &[i32], (tokens, padding): (i64, i64)) -> Vec<Vec<usize>> {
    let mut rows = Vec::new();
    let (mut row, mut filled) = (Vec::new(), 0);
    for pair in starts.windows(2) {
        let length = i64::from(pair[1] - pair[0]);
        row.push(length as usize);
        filled += length;
        if filled == tokens {
            row.push(padding as usize);
            rows.push(std::mem::take(&mut row));
            filled = 0;
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::lengths;

    #[test]
    fn padding_is_a_document_of_each_row() {
        assert_eq!(lengths(&[0, 2, 5, 9, 10], (5, 1)), [vec![2, 3, 1], vec![4, 1, 1]]);
    }
}
