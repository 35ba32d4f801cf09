//! Data sets that hand out batches, each a way to make rows of samples.
//!
//! | data set | a row is | wasted |
//! |---|---|---|
//! | [`BaseDataset`] | a sample, padded to one length | one length − sample |
//! | [`StandardDataset`] | a sample, padded to the batch's longest ([`collate`]) | longest − sample |
//! | [`StandardDataset::balanced`] | the same, of samples of about one length | at most `k` per sample |
//! | [`SequencedDataset`] | all samples of the batch, one behind the other | nothing; what is beyond a capacity is lost |
//! | [`PackedDataset`] | as many documents as fit a row, planned over the whole data set | well under 1 % |

mod base;
mod packed;
mod sequenced;
mod standard;

pub use base::BaseDataset;
pub use packed::{PackedDataset, PackedOptions};
pub use sequenced::{Capacity, Overflow, SequencedDataset};
pub use standard::{StandardDataset, collate};

use crate::error::{Error, Result};
use crate::host_batch::HostBatch;
use crate::samples::Samples;

/// Documents that were read, one behind the other.
#[derive(Debug, Default)]
struct Documents {
    tokens: Vec<u32>,
    ends: Vec<usize>,
}

impl Documents {
    /// Empty, in the memory of `host`.
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

    /// Reads tokens `start..start + length` of a sample, which must have them.
    fn read<S: Samples + ?Sized>(
        &mut self,
        samples: &S,
        sample: usize,
        start: usize,
        length: usize,
    ) -> Result<()> {
        let begin = self.tokens.len();
        samples.read_part(sample, start..start + length, &mut self.tokens)?;
        let found = self.tokens.len() - begin;
        if found != length {
            return Err(Error::Record {
                from: "samples".into(),
                place: format!("sample {sample}"),
                reason: format!(
                    "{found} tokens from token {start} on, and its length promised {length}; the data changed after it was \
                     opened, so open it again"
                ),
            });
        }
        self.ends.push(self.tokens.len());
        Ok(())
    }

    /// Reads the samples that `host` has chosen, cut to `max_length`; returns how many tokens were cut off.
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
