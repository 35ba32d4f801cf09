//! Batches of samples of about one length (the assignment's `BalancedBatchSampler`).
//!
//! A batch padded to its longest sample wastes `Σ (longest − lengthᵢ)` places. If lengths within a batch differ by at most
//! `k`, that is at most `k` per sample.
//!
//! The samples are sorted by length once, by counting: `O(n + longest)`. In each epoch the axis of lengths is divided into
//! *windows* of `k + 1` consecutive lengths, beginning at a random offset, so that the borders are elsewhere in every
//! epoch. All samples of a window are permuted and cut into batches, of which the last may be short, and the order of all
//! batches of the epoch is permuted. So
//!
//! - longest − shortest ≤ `k` in every batch, exactly;
//! - every sample is in exactly one batch of an epoch;
//! - any two samples of a window are equally likely to meet;
//! - there are at most as many short batches as windows, `⌈(longest − shortest + 1) / (k + 1)⌉ + 1`;
//! - where one window holds all lengths, the batches are those of standard batching, to the last index.
//!
//! Where short batches are dropped, so are their samples, and the same ones in every epoch where no window has enough of
//! their neighbours: [`BatchSampler::dropped_samples`] counts them. An epoch whose windows leave no full one has no batch. At least one offset leaves one,
//! or the sampler is refused; a loader passes over the epochs that have none.
//!
//! Nothing is stored per epoch but the windows. Batch `i` is found by a binary search over them, and each of its samples by
//! one evaluation of a [`Permutation`] and one look into the sorted order: the number of operations does not depend on the
//! size of the data set, and [`BalancedBatchSampler::choose_counted`] counts them.
//!
//! Buckets that hold lists of remaining samples, as the assignment suggests, need `O(n)` state that must be replayed to
//! resume.

use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::fingerprint::{Fingerprint, SEQUENCE};
use crate::length_order::{LengthOrder, Usable, lengths_of};
use crate::permutation::Permutation;
use crate::random_batch_sampler::{
    BatchSampler, Incomplete, batches_of, check_batch_size, check_index, stream,
};
use crate::samples::Samples;

const WHAT: &str = "BalancedBatchSampler";

/// How large a batch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchSize {
    /// So many samples.
    Samples(usize),
    /// As many samples of a window as have at most so many places when padded to the window's longest, so that short
    /// samples come in large batches.
    Tokens(usize),
}

/// How samples are balanced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BalancedOptions {
    /// How large a batch is.
    pub batch_size: BatchSize,
    /// The largest difference in length within a batch, in tokens.
    pub k: usize,
    /// Tokens that are kept of a sample: longer ones count as this long.
    pub max_length: usize,
    /// Seed of the order.
    pub seed: u64,
    /// The last batch of a window.
    pub incomplete: Incomplete,
}

impl Default for BalancedOptions {
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

/// `k` as a flag gives it.
///
/// # Errors
/// A negative number.
pub fn k_from_flag(k: i64) -> Result<usize> {
    usize::try_from(k).map_err(|_| Error::Config {
        what: "k",
        reason: format!(
            "{k} is negative; expected the largest difference in length within a batch, from 0 on"
        ),
    })
}

/// What choosing a batch took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Operations {
    /// Comparisons of the search for the batch's window.
    pub comparisons: u64,
    /// Reads of the sorted order, or of the usable samples where one window holds all.
    pub lookups: u64,
    /// Passes through the permutation's network: below two for each sample, and for the batch, on average.
    pub passes: u64,
}

/// Random batches within which lengths differ by at most `k`.
///
/// ```
/// use dataloading::{BalancedBatchSampler, BalancedOptions, BatchSampler, BatchSize};
///
/// let samples: Vec<Vec<u32>> = (0..100).map(|i| vec![7; 1 + i % 50]).collect();
/// let options = BalancedOptions { batch_size: BatchSize::Samples(4), k: 3, ..BalancedOptions::default() };
/// let sampler = BalancedBatchSampler::new(&samples, &options)?;
/// let mut chosen = Vec::new();
/// sampler.choose(0, 5, &mut chosen)?;
/// let lengths: Vec<usize> = chosen.iter().map(|&i| samples[i as usize].len()).collect();
/// assert!(lengths.iter().max().unwrap() - lengths.iter().min().unwrap() <= 3);
/// # Ok::<(), dataloading::Error>(())
/// ```
#[derive(Debug)]
pub struct BalancedBatchSampler {
    options: BalancedOptions,
    usable: Usable,
    /// `None` where one window holds all: then the order of the data set does.
    sorted: Option<LengthOrder>,
    shortest: u32,
    longest: u32,
    /// The windows of the latest two epochs, by parity: workers that are ahead are in the next one.
    cache: Mutex<[Option<OfEpoch>; 2]>,
}

/// An epoch and its windows.
type OfEpoch = (u64, Arc<Windows>);

/// The windows of one epoch, those without samples left out.
#[derive(Debug, Default)]
struct Windows {
    /// Where each begins in the sorted order, and the end.
    samples: Vec<u32>,
    /// The number of each one's first batch, and the number of all batches.
    batches: Vec<usize>,
    /// Samples per batch.
    batch_sizes: Vec<usize>,
    /// Number of each on the axis of lengths.
    numbers: Vec<u64>,
}

impl BalancedBatchSampler {
    /// Sorts the samples that have a token. `O(n + longest)` time; 4 bytes for each sample and each length. Where one window
    /// holds all, 4 bytes for each sample that has a token if some have none, else nothing.
    ///
    /// # Errors
    /// A data set without tokens; a batch size of 0, or in tokens below the longest sample, or larger than any window where
    /// short batches are dropped.
    pub fn new<S: Samples + ?Sized>(samples: &S, options: &BalancedOptions) -> Result<Self> {
        let mut lengths = lengths_of(WHAT, samples)?;
        let usable = Usable::new(WHAT, &lengths, options.max_length)?;
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
                        "a batch of {tokens} tokens cannot hold the longest sample, {longest} tokens; take larger \
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
                    "no {} consecutive lengths have the samples of a full batch, and incomplete ones are dropped, so there is \
                     no batch; keep them, take smaller batches, or a larger k",
                    sampler.width()
                ),
            });
        }
        Ok(sampler)
    }

    /// Lengths of a window.
    fn width(&self) -> u64 {
        if self.sorted.is_some() { self.options.k as u64 + 1 } else { 1 }
    }

    /// What can be used of the data set.
    pub fn usable(&self) -> &Usable {
        &self.usable
    }

    /// The most windows that an epoch has, and so the most short batches.
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
        if let Some((of, windows)) = slot
            && *of == epoch
        {
            return windows.clone();
        }
        // The first window holds `offset` lengths, from 1 to all of its width.
        let offset = Permutation::new(self.width(), self.options.seed, epoch, stream::OFFSET).at(0) + 1;
        let windows = Arc::new(self.divide(offset));
        *slot = Some((epoch, windows.clone()));
        windows
    }

    /// The windows of which the first holds `offset` lengths.
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

    /// As [`BatchSampler::choose`], and what it took.
    ///
    /// # Errors
    /// As [`BatchSampler::choose`].
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
        for place in first..(first + batch_size).min(samples) {
            let (element, passes) = order.at_counted(place as u64);
            done.passes += u64::from(passes);
            chosen.push(element as u32);
        }
        // A loop of its own, so that the processor has all these reads of a large table under way at once.
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
        let BalancedOptions { batch_size, k, max_length, seed: _, incomplete } = self.options;
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
