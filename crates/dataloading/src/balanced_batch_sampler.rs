//! Batches of samples of similar length (the assignment's `BalancedBatchSampler`).
//!
//! A batch padded to its longest sample wastes `Σ (longest − lengthᵢ)` positions. If lengths within a batch differ by at
//! most `k`, that is at most `k` per sample.
//!
//! The samples are sorted by length once, by counting sort: `O(n + longest)`. Each epoch divides the range of lengths into
//! *windows* of `k + 1` consecutive lengths, at a random offset that differs from epoch to epoch. The samples of each
//! window are permuted and cut into batches (the last may be short), and the batches of the epoch are permuted. So
//!
//! - longest − shortest ≤ `k` in every batch;
//! - every sample is in exactly one batch of an epoch;
//! - any two samples of a window are equally likely to share a batch;
//! - there are at most as many short batches as windows, `⌈(longest − shortest + 1) / (k + 1)⌉ + 1`;
//! - if one window holds all lengths, the batches are those of standard batching, index by index.
//!
//! If short batches are dropped, their samples are dropped too, and in every epoch the same ones if no window has enough
//! samples near their lengths: [`BatchSampler::dropped_samples`] counts them. An epoch without a full batch is empty; a
//! loader skips it. A sampler that has no full batch at any offset is an error.
//!
//! The windows are the only state of an epoch. Batch `i` is found by a binary search over them, and each of its samples by
//! one evaluation of a [`Permutation`] and one read of the sorted order: the cost does not depend on the size of the data
//! set, and [`BalancedBatchSampler::choose_counted`] counts it.
//!
//! Buckets with lists of remaining samples, as the assignment suggests, need `O(n)` state that must be replayed to resume.

use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::fingerprint::{Fingerprint, SEQUENCE};
use crate::length_order::{LengthOrder, UsableSamples, lengths_of};
use crate::permutation::Permutation;
use crate::random_batch_sampler::{
    BatchSampler, Incomplete, batches_of, check_batch_size, check_index, stream,
};
use crate::samples::Samples;

const WHAT: &str = "BalancedBatchSampler";

/// The size of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchSize {
    /// A number of samples.
    Samples(usize),
    /// A number of positions: as many samples as fit when padded to the longest of their window, so that batches of short
    /// samples have more samples.
    Tokens(usize),
}

/// Options of balanced batching.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BalancedConfig {
    /// The size of a batch.
    pub batch_size: BatchSize,
    /// The maximum difference in length within a batch, in tokens.
    pub k: usize,
    /// The maximum tokens of a sample; longer ones are truncated and count as this long.
    pub max_length: usize,
    /// The seed of the order.
    pub seed: u64,
    /// How the incomplete last batch of a window is handled.
    pub incomplete: Incomplete,
}

impl Default for BalancedConfig {
    fn default() -> Self {
        Self {
            batch_size: BatchSize::Samples(32),
            k: 20,
            max_length: 512,
            seed: 0,
            incomplete: Incomplete::Keep,
        }
    }
}

/// Returns `k` from a signed command-line value.
///
/// # Errors
/// The number is negative.
pub fn k_from_flag(k: i64) -> Result<usize> {
    usize::try_from(k).map_err(|_| Error::Config {
        what: "k",
        reason: format!(
            "{k} is negative; expected the largest difference in length within a batch, from 0 on"
        ),
    })
}

/// The cost of choosing a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Operations {
    /// Comparisons in the search for the window of the batch.
    pub comparisons: u64,
    /// Reads of the sorted order, or of the usable samples if one window holds all.
    pub lookups: u64,
    /// Passes through the permutation network: less than two per sample and per batch on average.
    pub passes: u64,
}

/// Random batches in which lengths differ by at most `k`.
///
/// ```
/// use dataloading::{BalancedBatchSampler, BalancedConfig, BatchSampler, BatchSize};
///
/// let samples: Vec<Vec<u32>> = (0..100).map(|i| vec![7; 1 + i % 50]).collect();
/// let options = BalancedConfig { batch_size: BatchSize::Samples(4), k: 3, ..BalancedConfig::default() };
/// let sampler = BalancedBatchSampler::new(&samples, &options)?;
/// let mut chosen = Vec::new();
/// sampler.choose(0, 5, &mut chosen)?;
/// let lengths: Vec<usize> = chosen.iter().map(|&i| samples[i as usize].len()).collect();
/// assert!(lengths.iter().max().unwrap() - lengths.iter().min().unwrap() <= 3);
/// # Ok::<(), dataloading::Error>(())
/// ```
#[derive(Debug)]
pub struct BalancedBatchSampler {
    options: BalancedConfig,
    usable: UsableSamples,
    /// `None` if one window holds all lengths: the order of the data set is used.
    sorted: Option<LengthOrder>,
    shortest: u32,
    longest: u32,
    /// The windows of the latest two epochs, by parity: prefetching workers may be in the next epoch.
    cache: Mutex<[Option<OfEpoch>; 2]>,
}

/// An epoch and its windows.
type OfEpoch = (u64, Arc<Windows>);

/// The non-empty windows of one epoch.
#[derive(Debug, Default)]
struct Windows {
    /// The start of each window in the sorted order, and the end.
    samples: Vec<u32>,
    /// The index of the first batch of each window, and the number of batches.
    batches: Vec<usize>,
    /// Samples per batch.
    batch_sizes: Vec<usize>,
    /// The index of each window on the axis of lengths.
    numbers: Vec<u64>,
}

impl BalancedBatchSampler {
    /// Sorts the samples that have a token. Takes `O(n + longest)` time and 4 bytes per sample and per length. If one
    /// window holds all lengths, it takes 4 bytes per usable sample if some are empty, else nothing.
    ///
    /// # Errors
    /// No sample has a token; the batch size is 0, less than the longest sample in tokens, or larger than any window if
    /// short batches are dropped.
    pub fn new<S: Samples + ?Sized>(samples: &S, options: &BalancedConfig) -> Result<Self> {
        let mut lengths = lengths_of(WHAT, samples)?;
        let usable = UsableSamples::new(WHAT, &lengths, options.max_length)?;
        let limit = u32::try_from(options.max_length).unwrap_or(u32::MAX);
        lengths.iter_mut().for_each(|length| *length = (*length).min(limit));
        let used = || lengths.iter().copied().filter(|&length| length > 0);
        let (shortest, longest) = (used().min().unwrap_or(1), used().max().unwrap_or(1));
        match options.batch_size {
            BatchSize::Samples(size) => check_batch_size(WHAT, size, options.incomplete, usable.len())?,
            BatchSize::Tokens(tokens) if tokens < longest as usize => {
                return Err(Error::Config {
                    what: WHAT,
                    reason: format!(
                        "a batch of {tokens} tokens cannot hold the longest sample, {longest} tokens; use larger \
                         batches, or a smaller max_length"
                    ),
                });
            }
            BatchSize::Tokens(_) => {}
        }
        let one_window = (longest - shortest) as usize <= options.k;
        let sorted = (!one_window).then(|| LengthOrder::new(&lengths, longest));
        let usable = if sorted.is_some() { usable.without_numbers() } else { usable };
        let cache = Mutex::new([None, None]);
        let sampler = Self { options: *options, usable, sorted, shortest, longest, cache };
        let has_batch = |offset| sampler.divide(offset).batches.last().is_some_and(|&batches| batches > 0);
        if options.incomplete == Incomplete::Drop && !(1..=sampler.width()).any(has_batch) {
            return Err(Error::Config {
                what: WHAT,
                reason: format!(
                    "no {} consecutive lengths have enough samples for a full batch, and incomplete ones are dropped, so there \
                     is no batch; keep them, or use smaller batches or a larger k",
                    sampler.width()
                ),
            });
        }
        Ok(sampler)
    }

    /// Returns the number of lengths per window.
    fn width(&self) -> u64 {
        if self.sorted.is_some() { self.options.k as u64 + 1 } else { 1 }
    }

    /// Returns the counts of usable samples.
    pub fn usable(&self) -> &UsableSamples {
        &self.usable
    }

    /// Returns the maximum number of windows of an epoch, which bounds the number of short batches.
    pub fn most_windows(&self) -> usize {
        let lengths = (self.longest - self.shortest) as usize + 1;
        let windows = lengths.div_ceil(self.options.k.saturating_add(1));
        if windows == 1 { 1 } else { windows + 1 }
    }

    fn batch_size(&self, longest: u32) -> usize {
        match self.options.batch_size {
            BatchSize::Samples(samples) => samples,
            BatchSize::Tokens(tokens) => tokens / longest as usize,
        }
    }

    fn windows(&self, epoch: u64) -> Arc<Windows> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = &mut cache[(epoch % 2) as usize];
        if let Some((planned_epoch, windows)) = slot
            && *planned_epoch == epoch
        {
            return windows.clone();
        }
        // The first window holds `offset` lengths, from 1 to the full width.
        let offset = Permutation::new(self.width(), self.options.seed, epoch, stream::OFFSET).at(0) + 1;
        let windows = Arc::new(self.divide(offset));
        *slot = Some((epoch, windows.clone()));
        windows
    }

    /// Returns the windows of an epoch whose first window holds `offset` lengths.
    fn divide(&self, offset: u64) -> Windows {
        let mut windows = Windows { samples: vec![0], batches: vec![0], ..Windows::default() };
        let mut push = |number: u64, end: u32, longest: u32| {
            let begin = *windows.samples.last().expect("begins with one");
            let first = *windows.batches.last().expect("begins with one");
            let batch_size = self.batch_size(longest);
            let batches = batches_of((end - begin) as usize, batch_size, self.options.incomplete);
            windows.samples.push(end);
            windows.batches.push(first + batches);
            windows.batch_sizes.push(batch_size);
            windows.numbers.push(number);
        };
        let Some(sorted) = &self.sorted else {
            push(0, self.usable.len() as u32, self.longest);
            return windows;
        };
        let width = self.width();
        let skipped = sorted.starts[1];
        let (mut low, mut high) = (u64::from(self.shortest), u64::from(self.shortest) + offset - 1);
        let mut number = 0;
        loop {
            let last = high.min(u64::from(self.longest)) as usize;
            let (begin, end) = (sorted.starts[low as usize], sorted.starts[last + 1]);
            if end > begin {
                let longest = (low as usize..=last).rev().find(|&l| sorted.starts[l + 1] > sorted.starts[l]);
                push(number, end - skipped, longest.expect("the window has samples") as u32);
            }
            if last == self.longest as usize {
                return windows;
            }
            number += 1;
            low = high + 1;
            high += width;
        }
    }

    /// Chooses as [`BatchSampler::choose`] does, and returns the cost.
    ///
    /// # Errors
    /// Same as [`BatchSampler::choose`].
    pub fn choose_counted(&self, epoch: u64, index: usize, chosen: &mut Vec<u32>) -> Result<Operations> {
        let windows = self.windows(epoch);
        let batches = *windows.batches.last().expect("begins with one");
        check_index(WHAT, epoch, index, batches)?;
        let seed = self.options.seed;
        let mut done = Operations::default();
        let mut index = index;
        if self.sorted.is_some() {
            let order = Permutation::new(batches as u64, seed, epoch, stream::BATCHES);
            let (element, passes) = order.at_counted(index as u64);
            index = element as usize;
            done.passes += u64::from(passes);
        }
        let window = windows.batches.partition_point(|&first| {
            done.comparisons += 1;
            first <= index
        }) - 1;
        let begin = windows.samples[window] as usize;
        let samples = windows.samples[window + 1] as usize - begin;
        let batch_size = windows.batch_sizes[window];
        let first = (index - windows.batches[window]) * batch_size;
        let order = Permutation::new(samples as u64, seed, epoch, stream::SAMPLES + windows.numbers[window]);
        chosen.clear();
        for position in first..(first + batch_size).min(samples) {
            let (element, passes) = order.at_counted(position as u64);
            done.passes += u64::from(passes);
            chosen.push(element as u32);
        }
        // A loop of its own, so that the processor overlaps these reads of a large table.
        for sample in chosen.iter_mut() {
            done.lookups += 1;
            *sample = match &self.sorted {
                None => self.usable.sample(*sample as usize),
                Some(sorted) => sorted.order[sorted.starts[1] as usize + begin + *sample as usize],
            };
        }
        Ok(done)
    }
}

impl BatchSampler for BalancedBatchSampler {
    fn seed(&self) -> u64 {
        self.options.seed
    }

    fn samples(&self) -> usize {
        self.usable.total()
    }

    fn batches(&self, epoch: u64) -> usize {
        *self.windows(epoch).batches.last().expect("begins with one")
    }

    fn dropped_samples(&self, epoch: u64) -> usize {
        if self.options.incomplete == Incomplete::Keep {
            return 0;
        }
        let windows = self.windows(epoch);
        let batches = windows.batches.windows(2).map(|ends| ends[1] - ends[0]);
        self.usable.len()
            - batches.zip(&windows.batch_sizes).map(|(batches, size)| batches * size).sum::<usize>()
    }

    fn fingerprint(&self) -> u64 {
        let BalancedConfig { batch_size, k, max_length, seed: _, incomplete } = self.options;
        let (kind, size) = match batch_size {
            BatchSize::Samples(samples) => (0, samples),
            BatchSize::Tokens(tokens) => (1, tokens),
        };
        Fingerprint::new(WHAT)
            .number(SEQUENCE)
            .numbers([kind, size as u64, k as u64, max_length as u64, incomplete as u64].into_iter())
            .finish()
    }

    fn choose(&self, epoch: u64, index: usize, chosen: &mut Vec<u32>) -> Result<()> {
        self.choose_counted(epoch, index, chosen).map(|_| ())
    }
}
