//! The samples of a batch joined into one long sequence with its boundaries (the assignment's `SequencedDataset`).

use super::Documents;
use crate::batch_source::BatchSource;
use crate::error::{Error, Result};
use crate::fingerprint::Fingerprint;
use crate::host_batch::HostBatch;
use crate::length_order::Usable;
use crate::random_batch_sampler::{BatchOptions, BatchSampler, RandomBatchSampler};
use crate::samples::Samples;

/// What becomes of the sample that reaches beyond the capacity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Overflow {
    /// Its beginning fills the sequence.
    #[default]
    Cut,
    /// It is left out.
    Drop,
}

/// The most tokens of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// How many.
    pub tokens: usize,
    /// The first sample that reaches beyond. Those behind it are left out in any case.
    pub overflow: Overflow,
}

/// Batches of one row: the samples of a random batch one behind the other, without padding, and where each begins
/// ([`Packing`](crate::Packing)). Positions restart with each sample and no label crosses into the next.
///
/// With a capacity, tokens beyond it are lost for this epoch, and counted in [`Counts::dropped`](crate::Counts::dropped):
/// [`PackedDataset`](super::PackedDataset) loses none.
#[derive(Debug)]
pub struct SequencedDataset<S> {
    samples: S,
    sampler: RandomBatchSampler,
    options: BatchOptions,
    capacity: Option<Capacity>,
    fingerprint: u64,
}

impl<S: Samples> SequencedDataset<S> {
    /// Over all samples that have a token.
    ///
    /// # Errors
    /// As [`RandomBatchSampler::new`]; a capacity that some sample, cut to `max_length`, could exceed alone, so that a
    /// sequence might be left with nothing.
    pub fn new(samples: S, options: &BatchOptions, capacity: Option<Capacity>) -> Result<Self> {
        const WHAT: &str = "SequencedDataset";
        let sampler = RandomBatchSampler::named(WHAT, &samples, options)?;
        if let Some(Capacity { tokens, .. }) = capacity
            && tokens < options.max_length
        {
            return Err(Error::Config {
                what: WHAT,
                reason: format!(
                    "the capacity of {tokens} tokens is less than max_length, {}; a sequence must hold one sample at least",
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

    /// What can be used of the data set.
    pub fn usable(&self) -> &Usable {
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
        let BatchOptions { max_length, pad, .. } = self.options;
        self.sampler.choose(epoch, index, &mut host.chosen)?;
        let mut documents = Documents::in_memory_of(host);
        let mut dropped = 0;
        let mut room = self.capacity.map_or(usize::MAX, |capacity| capacity.tokens);
        for &sample in &host.chosen {
            let length = self.samples.length(sample as usize);
            let wanted = length.min(max_length);
            let cut = self.capacity.is_some_and(|capacity| capacity.overflow == Overflow::Cut);
            let kept = if wanted <= room {
                wanted
            } else if cut {
                room
            } else {
                0
            };
            dropped += length - kept;
            // Behind a sample that did not fit there is no room, also where it was left out.
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
