//! Random batches, regardless of length.

use crate::error::{Error, Result};
use crate::fingerprint::{Fingerprint, SEQUENCE};
use crate::length_order::{UsableSamples, lengths_of};
use crate::permutation::Permutation;
use crate::samples::Samples;

/// Streams of [`Permutation`] within one epoch.
pub(crate) mod stream {
    /// Samples within a window of lengths: this plus the index of the window. Standard batching has one window.
    pub(crate) const SAMPLES: u64 = 0;
    /// The order of batches, or of packed rows.
    pub(crate) const BATCHES: u64 = 1 << 40;
    /// The offset of the windows.
    pub(crate) const OFFSET: u64 = 2 << 40;
    /// Documents of one length over the slots of a plan: this plus the length.
    pub(crate) const DOCUMENTS: u64 = 3 << 40;
}

/// The choice of the samples of a batch: a pure function of (seed, epoch, index).
pub trait BatchSampler: Send + Sync {
    /// Returns the seed of all random choices.
    fn seed(&self) -> u64;

    /// Returns the number of samples of the data set, skipped ones included.
    fn samples(&self) -> usize;

    /// Returns the number of batches of epoch `epoch`.
    fn batches(&self, epoch: u64) -> usize;

    /// Returns the number of samples with tokens that epoch `epoch` drops because their batch would be incomplete.
    fn dropped_samples(&self, epoch: u64) -> usize;

    /// Returns a fingerprint of the strategy and its options, without seed and data. The same in every process.
    fn fingerprint(&self) -> u64;

    /// Replaces `chosen` by the sample indices of batch `index`.
    ///
    /// # Errors
    /// The index exceeds the batches of the epoch.
    fn choose(&self, epoch: u64, index: usize, chosen: &mut Vec<u32>) -> Result<()>;
}

/// The order of samples in an epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    /// Random, different in every epoch.
    #[default]
    Shuffled,
    /// The order of the data set, for evaluation.
    Sequential,
}

/// How an incomplete last batch is handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Incomplete {
    /// Return it, with fewer samples.
    #[default]
    Keep,
    /// Drop it for this epoch; [`BatchSampler::dropped_samples`] counts its samples. With random batches other epochs drop
    /// other samples; balanced batches may always drop a sample whose length is far from all others.
    Drop,
}

/// Options of data sets with one sample per row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchConfig {
    /// Samples per batch. If larger than the data set: one short batch, or an error if incomplete batches are dropped.
    pub batch_size: usize,
    /// The maximum tokens of a sample; the rest is truncated and counted.
    pub max_length: usize,
    /// The padding token. It is never a label, so any id works for a tokenizer without one.
    pub pad: u32,
    /// The seed of the order.
    pub seed: u64,
    /// The order of samples.
    pub order: Order,
    /// How an incomplete last batch is handled.
    pub incomplete: Incomplete,
}

impl Default for BatchConfig {
    fn default() -> Self {
        Self {
            batch_size: 32,
            max_length: 512,
            pad: 0,
            seed: 0,
            order: Order::Shuffled,
            incomplete: Incomplete::Keep,
        }
    }
}

/// Standard batching: all samples of an epoch in random order, divided into batches. Samples without tokens are skipped.
#[derive(Debug, Clone)]
pub struct RandomBatchSampler {
    usable: UsableSamples,
    options: BatchConfig,
}

impl RandomBatchSampler {
    /// Creates the sampler over all samples that have a token.
    ///
    /// # Errors
    /// No sample has a token; the batch size is 0, or larger than the data set if incomplete batches are dropped.
    pub fn new<S: Samples + ?Sized>(samples: &S, options: &BatchConfig) -> Result<Self> {
        Self::named("RandomBatchSampler", samples, options)
    }

    pub(crate) fn named<S: Samples + ?Sized>(
        what: &'static str,
        samples: &S,
        options: &BatchConfig,
    ) -> Result<Self> {
        let usable = UsableSamples::new(what, &lengths_of(what, samples)?, options.max_length)?;
        check_batch_size(what, options.batch_size, options.incomplete, usable.len())?;
        Ok(Self { usable, options: *options })
    }

    /// Returns the counts of usable samples.
    pub fn usable(&self) -> &UsableSamples {
        &self.usable
    }
}

pub(crate) fn check_batch_size(
    what: &'static str,
    batch_size: usize,
    incomplete: Incomplete,
    samples: usize,
) -> Result<()> {
    let reason = if batch_size == 0 {
        "the batch size is 0; expected at least 1".into()
    } else if incomplete == Incomplete::Drop && batch_size > samples {
        format!(
            "the batch size {batch_size} is larger than the {samples} samples, and incomplete batches are dropped, so there \
             is no batch; keep them, or use smaller batches"
        )
    } else {
        return Ok(());
    };
    Err(Error::Config { what, reason })
}

pub(crate) fn check_index(what: &'static str, epoch: u64, index: usize, batches: usize) -> Result<()> {
    if index < batches {
        return Ok(());
    }
    Err(Error::Config { what, reason: format!("batch {index} of epoch {epoch}, which has {batches}") })
}

/// Returns the number of batches of `samples` samples.
pub(crate) fn batches_of(samples: usize, batch_size: usize, incomplete: Incomplete) -> usize {
    match incomplete {
        Incomplete::Keep => samples.div_ceil(batch_size),
        Incomplete::Drop => samples / batch_size,
    }
}

impl BatchSampler for RandomBatchSampler {
    fn seed(&self) -> u64 {
        self.options.seed
    }

    fn samples(&self) -> usize {
        self.usable.total()
    }

    fn batches(&self, _epoch: u64) -> usize {
        batches_of(self.usable.len(), self.options.batch_size, self.options.incomplete)
    }

    fn dropped_samples(&self, epoch: u64) -> usize {
        self.usable.len().saturating_sub(self.batches(epoch) * self.options.batch_size)
    }

    fn fingerprint(&self) -> u64 {
        let BatchConfig { batch_size, max_length, pad, seed: _, order, incomplete } = self.options;
        Fingerprint::new("RandomBatchSampler")
            .number(SEQUENCE)
            .numbers([batch_size as u64, max_length as u64, pad.into()].into_iter())
            .numbers([order as u64, incomplete as u64].into_iter())
            .finish()
    }

    fn choose(&self, epoch: u64, index: usize, chosen: &mut Vec<u32>) -> Result<()> {
        check_index("RandomBatchSampler", epoch, index, self.batches(epoch))?;
        let BatchConfig { batch_size, seed, order, .. } = self.options;
        let samples = self.usable.len();
        let positions = index * batch_size..((index + 1) * batch_size).min(samples);
        chosen.clear();
        match order {
            Order::Sequential => chosen.extend(positions.map(|position| self.usable.sample(position))),
            Order::Shuffled => {
                let order = Permutation::new(samples as u64, seed, epoch, stream::SAMPLES);
                chosen
                    .extend(positions.map(|position| self.usable.sample(order.at(position as u64) as usize)));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn samples(lengths: &[usize]) -> Vec<Vec<u32>> {
        lengths.iter().map(|&length| vec![1; length]).collect()
    }

    proptest! {
        #[test]
        fn every_sample_once_per_epoch(
            lengths in proptest::collection::vec(0_usize..4, 1..80),
            batch_size in 1_usize..20,
            epoch: u64,
            seed: u64,
            sequential: bool,
        ) {
            prop_assume!(lengths.iter().any(|&length| length > 0));
            let order = if sequential { Order::Sequential } else { Order::Shuffled };
            let options = BatchConfig { batch_size, seed, order, ..BatchConfig::default() };
            let sampler = RandomBatchSampler::new(&samples(&lengths), &options).unwrap();
            let mut seen = vec![0; lengths.len()];
            let mut chosen = Vec::new();
            for index in 0..sampler.batches(epoch) {
                sampler.choose(epoch, index, &mut chosen).unwrap();
                prop_assert!(chosen.len() == batch_size || index + 1 == sampler.batches(epoch));
                chosen.iter().for_each(|&sample| seen[sample as usize] += 1);
            }
            let expected: Vec<usize> = lengths.iter().map(|&length| length.min(1)).collect();
            prop_assert_eq!(seen, expected);
        }
    }

    #[test]
    fn sizes_without_a_batch_are_refused() {
        let samples = samples(&[1, 2, 3]);
        let options = BatchConfig { batch_size: 5, ..BatchConfig::default() };
        assert_eq!(RandomBatchSampler::new(&samples, &options).unwrap().batches(0), 1);
        let options = BatchConfig { incomplete: Incomplete::Drop, ..options };
        assert_eq!(
            RandomBatchSampler::new(&samples, &options).unwrap_err().to_string(),
            "RandomBatchSampler: the batch size 5 is larger than the 3 samples, and incomplete batches are dropped, so \
             there is no batch; keep them, or use smaller batches"
        );
        let options = BatchConfig { batch_size: 0, ..BatchConfig::default() };
        assert!(RandomBatchSampler::new(&samples, &options).is_err());
    }
}
