//! Data sets: strategies that make batches of rows from samples.
//!
//! | data set | a row is | wasted |
//! |---|---|---|
//! | [`BaseDataset`] | a sample, padded to a fixed length | fixed length − sample |
//! | [`StandardDataset`] | a sample, padded to the longest of the batch ([`collate`]) | longest − sample |
//! | [`StandardDataset::balanced`] | the same, with samples of similar length | at most `k` per sample |
//! | [`SequencedDataset`] | all samples of the batch, concatenated | nothing; tokens beyond a capacity are dropped |
//! | [`PackedDataset`] | as many documents as fit, planned over the whole data set | well under 1 % |

mod base;
mod packed;
mod sequenced;
mod standard;

pub use base::BaseDataset;
pub use packed::{PackedConfig, PackedDataset};
pub use sequenced::{Capacity, Overflow, SequencedDataset};
pub use standard::{StandardDataset, collate};

use crate::error::{Error, Result};
use crate::host_batch::HostBatch;
use crate::samples::Samples;

/// Concatenated documents.
#[derive(Debug, Default)]
struct Documents {
    tokens: Vec<u32>,
    ends: Vec<usize>,
}

impl Documents {
    /// Creates an empty buffer that reuses the memory of `host`.
    fn in_memory_of(host: &mut HostBatch) -> Self {
        let mut documents =
            Self { tokens: std::mem::take(&mut host.scratch), ends: std::mem::take(&mut host.ends) };
        documents.tokens.clear();
        documents.ends.clear();
        documents
    }

    fn give_back(self, host: &mut HostBatch) {
        host.scratch = self.tokens;
        host.ends = self.ends;
    }

    /// Reads tokens `start..start + length` of a sample; fewer tokens are an error.
    fn read<S: Samples + ?Sized>(
        &mut self,
        samples: &S,
        sample: usize,
        start: usize,
        length: usize,
    ) -> Result<()> {
        let begin = self.tokens.len();
        samples.read_part(sample, start..start + length, &mut self.tokens)?;
        let count = self.tokens.len() - begin;
        if count != length {
            return Err(Error::Record {
                from: "samples".into(),
                location: format!("sample {sample}"),
                reason: format!(
                    "{count} tokens from token {start} on, but its length implies {length}; the data changed after it was \
                     opened; open it again"
                ),
            });
        }
        self.ends.push(self.tokens.len());
        Ok(())
    }

    /// Reads the samples `chosen`, truncated to `max_length`; returns the number of tokens truncated.
    fn read_chosen<S: Samples + ?Sized>(
        &mut self,
        samples: &S,
        chosen: &[u32],
        max_length: usize,
    ) -> Result<usize> {
        let mut beyond = 0;
        for &sample in chosen {
            let length = samples.length(sample as usize);
            beyond += length.saturating_sub(max_length);
            self.read(samples, sample as usize, 0, length.min(max_length))?;
        }
        Ok(beyond)
    }

    fn iter(&self) -> impl ExactSizeIterator<Item = &[u32]> + Clone {
        let start = |number: usize| if number == 0 { 0 } else { self.ends[number - 1] };
        (0..self.ends.len()).map(move |number| &self.tokens[start(number)..self.ends[number]])
    }
}
