//! The samples of a batch concatenated into one sequence with boundaries (the assignment's `SequencedDataset`).

use super::Documents;
use crate::batch_source::BatchSource;
use crate::error::{Error, Result};
use crate::fingerprint::Fingerprint;
use crate::host_batch::HostBatch;
use crate::length_order::UsableSamples;
use crate::random_batch_sampler::{BatchConfig, BatchSampler, RandomBatchSampler};
use crate::samples::Samples;

/// How a sample that exceeds the capacity is handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Overflow {
    /// Truncate it to the rest of the capacity.
    #[default]
    Truncate,
    /// Drop it.
    Drop,
}

/// The maximum length of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Tokens.
    pub tokens: usize,
    /// How the first sample beyond the capacity is handled. All samples after it are dropped.
    pub overflow: Overflow,
}

/// Batches of one row: the samples of a random batch, concatenated without padding, with their boundaries
/// ([`Packing`](crate::Packing)). Positions restart with each sample and no label crosses a boundary.
///
/// With a capacity, tokens beyond it are dropped for this epoch and counted in [`Counts::dropped`](crate::Counts::dropped);
/// [`PackedDataset`](super::PackedDataset) drops none.
#[derive(Debug)]
pub struct SequencedDataset<S> {
    samples: S,
    sampler: RandomBatchSampler,
    options: BatchConfig,
    capacity: Option<Capacity>,
    fingerprint: u64,
}

impl<S: Samples> SequencedDataset<S> {
    /// Creates the data set over all samples that have a token.
    ///
    /// # Errors
    /// Same as [`RandomBatchSampler::new`]; a capacity smaller than `max_length`, with which a sequence could be empty.
    pub fn new(samples: S, options: &BatchConfig, capacity: Option<Capacity>) -> Result<Self> {
        const WHAT: &str = "SequencedDataset";
        let sampler = RandomBatchSampler::named(WHAT, &samples, options)?;
        if let Some(Capacity { tokens, .. }) = capacity
            && tokens < options.max_length
        {
            return Err(Error::Config {
                what: WHAT,
                reason: format!(
                    "the capacity of {tokens} tokens is less than max_length, {}; a sequence must hold at least one sample",
                    options.max_length
                ),
            });
        }
        let room = capacity.map_or([0, 0], |room| [room.tokens as u64, 1 + room.overflow as u64]);
        let fingerprint = Fingerprint::new(WHAT)
            .number(samples.fingerprint())
            .number(sampler.fingerprint())
            .numbers(room.into_iter())
            .finish();
        Ok(Self { samples, sampler, options: *options, capacity, fingerprint })
    }

    /// Returns the counts of usable samples.
    pub fn usable(&self) -> &UsableSamples {
        self.sampler.usable()
    }
}

impl<S: Samples> BatchSource for SequencedDataset<S> {
    fn seed(&self) -> u64 {
        self.options.seed
    }

    fn batches(&self, epoch: u64) -> usize {
        self.sampler.batches(epoch)
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn fill(&self, epoch: u64, index: usize, host: &mut HostBatch) -> Result<()> {
        let BatchConfig { max_length, pad, .. } = self.options;
        self.sampler.choose(epoch, index, &mut host.chosen)?;
        let mut documents = Documents::in_memory_of(host);
        let mut dropped = 0;
        let mut room = self.capacity.map_or(usize::MAX, |capacity| capacity.tokens);
        for &sample in &host.chosen {
            let length = self.samples.length(sample as usize);
            let wanted = length.min(max_length);
            let cut = self.capacity.is_some_and(|capacity| capacity.overflow == Overflow::Truncate);
            let kept = if wanted <= room {
                wanted
            } else if cut {
                room
            } else {
                0
            };
            dropped += length - kept;
            // After the first sample that does not fit, nothing is added, even if that sample is dropped.
            room = if kept < wanted { 0 } else { room - kept };
            if kept > 0 {
                documents.read(&self.samples, sample as usize, 0, kept)?;
            }
        }
        let length = documents.tokens.len();
        host.write_packed(documents.iter().map(|document| (0, document)), 1, length, pad, dropped)?;
        documents.give_back(host);
        Ok(())
    }
}
