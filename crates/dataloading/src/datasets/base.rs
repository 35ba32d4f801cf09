//! Every sample truncated or padded to one length (the assignment's `BaseDataset`).

use super::Documents;
use crate::batch_source::BatchSource;
use crate::error::{Error, Result};
use crate::fingerprint::Fingerprint;
use crate::host_batch::HostBatch;
use crate::length_order::UsableSamples;
use crate::random_batch_sampler::{BatchConfig, BatchSampler, RandomBatchSampler};
use crate::samples::Samples;

/// Random batches `[batch_size, max_length]`, for samples of any length: the baseline of the other strategies.
#[derive(Debug)]
pub struct BaseDataset<S> {
    samples: S,
    sampler: RandomBatchSampler,
    options: BatchConfig,
    fingerprint: u64,
}

impl<S: Samples> BaseDataset<S> {
    /// Creates the data set over all samples that have a token.
    ///
    /// # Errors
    /// Same as [`RandomBatchSampler::new`]; a batch too large for memory.
    pub fn new(samples: S, options: &BatchConfig) -> Result<Self> {
        let sampler = RandomBatchSampler::named("BaseDataset", &samples, options)?;
        let rows = options.batch_size.min(sampler.usable().len());
        let bytes = options.max_length.checked_mul(rows).and_then(|positions| positions.checked_mul(64));
        if bytes.is_none_or(|bytes| i64::try_from(bytes).is_err()) {
            return Err(Error::Config {
                what: "BaseDataset",
                reason: format!(
                    "{rows} rows padded to max_length, {}, exceed the memory; use a smaller one",
                    options.max_length
                ),
            });
        }
        let fingerprint =
            Fingerprint::new("BaseDataset").number(samples.fingerprint()).number(sampler.fingerprint());
        Ok(Self { samples, sampler, options: *options, fingerprint: fingerprint.finish() })
    }

    /// Returns the counts of usable samples.
    pub fn usable(&self) -> &UsableSamples {
        self.sampler.usable()
    }
}

impl<S: Samples> BatchSource for BaseDataset<S> {
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
        let beyond = documents.read_chosen(&self.samples, &host.chosen, max_length)?;
        host.write_rows(documents.iter(), max_length, pad, beyond)?;
        documents.give_back(host);
        Ok(())
    }
}
