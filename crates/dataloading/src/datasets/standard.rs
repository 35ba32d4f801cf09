//! Samples truncated to a maximum length and padded to the longest of their batch (the assignment's `StandardDataset` and
//! `collate_fn`).

use tch::Device;

use super::Documents;
use crate::balanced_batch_sampler::{BalancedBatchSampler, BalancedConfig};
use crate::batch::Batch;
use crate::batch_source::BatchSource;
use crate::error::{Error, Result};
use crate::fingerprint::Fingerprint;
use crate::host_batch::HostBatch;
use crate::random_batch_sampler::{BatchConfig, BatchSampler, RandomBatchSampler};
use crate::samples::Samples;

/// Returns one batch of these samples, padded with `pad` to the longest.
///
/// # Errors
/// There is not enough memory.
///
/// ```
/// let batch = dataloading::collate(&[&[5, 6, 7], &[8]], 0)?;
/// assert_eq!(batch.tokens.size(), [2, 3]);
/// assert_eq!((batch.counts.tokens, batch.counts.padding, batch.counts.targets), (4, 2, 2));
/// # Ok::<(), dataloading::Error>(())
/// ```
pub fn collate(samples: &[&[u32]], pad: u32) -> Result<Batch> {
    let mut host = HostBatch::new(Device::Cpu);
    collate_into(&mut host, samples.iter().copied(), pad, 0)?;
    host.finish()
}

fn collate_into<'a>(
    host: &mut HostBatch,
    samples: impl ExactSizeIterator<Item = &'a [u32]> + Clone,
    pad: u32,
    dropped: usize,
) -> Result<()> {
    let longest = samples.clone().map(<[u32]>::len).max().unwrap_or(0);
    host.write_rows(samples, longest, pad, dropped)
}

/// Batches `[samples, longest of the batch]` of samples chosen by a [`BatchSampler`].
#[derive(Debug)]
pub struct StandardDataset<S, B = RandomBatchSampler> {
    samples: S,
    sampler: B,
    max_length: usize,
    pad: u32,
    fingerprint: u64,
}

impl<S: Samples> StandardDataset<S> {
    /// Creates standard batching: random batches of all samples that have a token.
    ///
    /// # Errors
    /// Same as [`RandomBatchSampler::new`].
    pub fn new(samples: S, options: &BatchConfig) -> Result<Self> {
        let sampler = RandomBatchSampler::named("StandardDataset", &samples, options)?;
        Self::with_sampler(samples, sampler, options.max_length, options.pad)
    }
}

impl<S: Samples> StandardDataset<S, BalancedBatchSampler> {
    /// Creates batches of samples of similar length, padded with `pad`.
    ///
    /// # Errors
    /// Same as [`BalancedBatchSampler::new`].
    pub fn balanced(samples: S, options: &BalancedConfig, pad: u32) -> Result<Self> {
        let sampler = BalancedBatchSampler::new(&samples, options)?;
        Self::with_sampler(samples, sampler, options.max_length, pad)
    }
}

impl<S: Samples, B: BatchSampler> StandardDataset<S, B> {
    /// Creates batches with a custom sampler; each sample is truncated to `max_length`.
    ///
    /// # Errors
    /// The sampler has another number of samples, or `max_length` is 0.
    pub fn with_sampler(samples: S, sampler: B, max_length: usize, pad: u32) -> Result<Self> {
        const WHAT: &str = "StandardDataset";
        let refuse = |reason| Err(Error::Config { what: WHAT, reason });
        if max_length == 0 {
            return refuse("max_length is 0; expected at least 1 token".into());
        }
        if sampler.samples() != samples.len() {
            return refuse(format!(
                "the sampler has {} samples, but the data set has {}; create the sampler from this data set",
                sampler.samples(),
                samples.len()
            ));
        }
        let fingerprint = Fingerprint::new(WHAT)
            .number(samples.fingerprint())
            .number(sampler.fingerprint())
            .numbers([max_length as u64, pad.into()].into_iter())
            .finish();
        Ok(Self { samples, sampler, max_length, pad, fingerprint })
    }

    /// Returns the sampler.
    pub fn sampler(&self) -> &B {
        &self.sampler
    }
}

impl<S: Samples, B: BatchSampler> BatchSource for StandardDataset<S, B> {
    fn seed(&self) -> u64 {
        self.sampler.seed()
    }

    fn batches(&self, epoch: u64) -> usize {
        self.sampler.batches(epoch)
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn fill(&self, epoch: u64, index: usize, host: &mut HostBatch) -> Result<()> {
        self.sampler.choose(epoch, index, &mut host.chosen)?;
        let mut documents = Documents::in_memory_of(host);
        let beyond = documents.read_chosen(&self.samples, &host.chosen, self.max_length)?;
        collate_into(host, documents.iter(), self.pad, beyond)?;
        documents.give_back(host);
        Ok(())
    }
}
