//! A loader: batches made ahead of time by worker threads, in order, resumable.
//!
//! A batch is a pure function of (seed, epoch, index), see [`BatchSource`]. So the sequence of batches does not depend on
//! the number of workers or the prefetch depth, and the state of the loader is its position in that sequence: the integers
//! of [`LoaderState`]. Resuming replays nothing and takes as long as starting.
//!
//! The global sequence is the batches of epoch 0, then those of epoch 1, and so on. With `R` ranks, each *round* gives
//! every rank one batch: rank `r` takes the batch at `position + r`, and the position advances by `R`. A round may span two
//! epochs, so that every rank always has a batch; only an incomplete last round of the last epoch is dropped. Epochs
//! without batches are skipped. Because the position counts global batches, a run can resume with another number of ranks.
//!
//! On CUDA a worker writes to page-locked memory (unless [`LoaderConfig::pinned`] is off) and copies asynchronously to the
//! device on its own stream, while the model computes. On the CPU the tensors of a batch are views of the memory that the
//! worker wrote, which is reused after they are dropped.

mod cursor;
mod queue;
mod staging;
mod worker;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use runtime::device::{Stream, record_stream};
use serde::{Deserialize, Serialize};
use tch::Device;

use crate::batch::Batch;
use crate::batch_source::BatchSource;
use crate::error::{Error, Result};
use cursor::Cursor;
use queue::{Queue, Taken};
use worker::{Builder, Made};

const WHAT: &str = "loader";

/// Upper bound of the number of workers: more threads than any machine has use for.
const MOST_WORKERS: u64 = 1024;

/// Upper bound of the number of ranks: a round visits its epochs one by one.
const MOST_RANKS: u64 = 1 << 24;

/// Options of a loader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderConfig {
    /// Number of worker threads, at most 1024; with 0 the caller's thread makes each batch on request.
    pub workers: usize,
    /// Prefetch depth: batches that are ready or in progress ahead of the consumer; at least 1 with workers.
    pub prefetch: usize,
    /// The device of the batches.
    pub device: Device,
    /// Whether batches for a CUDA device are written to page-locked memory, so that copies are asynchronous. From pageable
    /// memory a worker waits for each copy. No effect on the CPU.
    pub pinned: bool,
    /// The rank of this process.
    pub rank: u64,
    /// The number of ranks, at most 2²⁴. It may exceed the batches of an epoch.
    pub ranks: u64,
    /// The number of epochs; `None` for no limit.
    pub epochs: Option<u64>,
}

impl Default for LoaderConfig {
    /// One worker, prefetch of 2, CPU, page-locked memory for CUDA devices, one rank, one epoch.
    fn default() -> Self {
        Self {
            workers: 1,
            prefetch: 2,
            device: Device::Cpu,
            pinned: true,
            rank: 0,
            ranks: 1,
            epochs: Some(1),
        }
    }
}

/// The state of a loader: the next batch of the global sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// The seed of all random choices.
    pub seed: u64,
    /// The epoch.
    pub epoch: u64,
    /// The number of batches of this epoch consumed by all ranks.
    pub position: u64,
    /// The number of batches of the epoch.
    pub batches: u64,
    /// [`BatchSource::fingerprint`], which detects changes of the data or of the batching.
    pub fingerprint: u64,
}

/// Counters of a loader.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LoaderStats {
    /// Batches returned.
    pub batches: u64,
    /// Seconds that the consumer waited for batches; without workers, seconds spent making them.
    pub waited_seconds: f64,
    /// Seconds that all workers spent making batches, including prefetched ones.
    pub worked_seconds: f64,
}

/// An iterator over batches.
///
/// It ends after an error; [`Loader::state`] is then at the batch that failed. Dropping it stops and joins the threads;
/// each finishes at most its current batch.
///
/// ```
/// use std::sync::Arc;
///
/// use dataloading::{BatchConfig, Loader, LoaderConfig, StandardDataset};
///
/// let samples: Vec<Vec<u32>> = (1..100).map(|length| vec![7; length]).collect();
/// let options = BatchConfig { batch_size: 8, ..BatchConfig::default() };
/// let dataset = Arc::new(StandardDataset::new(samples, &options)?);
///
/// let mut loader = Loader::new(dataset.clone(), &LoaderConfig::default())?;
/// let first = loader.next().unwrap()?;
/// assert_eq!(first.counts.documents, 8);
///
/// let rest = Loader::resume(dataset, &LoaderConfig::default(), &loader.state())?;
/// assert_eq!(rest.count(), 12);
/// # Ok::<(), dataloading::Error>(())
/// ```
pub struct Loader {
    source: Arc<dyn BatchSource>,
    options: LoaderConfig,
    /// The position after the last batch returned.
    cursor: Cursor,
    queue: Arc<Queue>,
    workers: Vec<JoinHandle<()>>,
    /// Makes the batches without workers.
    inline: Option<Builder>,
    finished: bool,
    batches: u64,
    waited_seconds: f64,
}

impl std::fmt::Debug for Loader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { options, cursor, batches, .. } = self;
        f.debug_struct("Loader")
            .field("options", options)
            .field("at", cursor)
            .field("batches", batches)
            .finish()
    }
}

impl Loader {
    /// Creates a loader at the first batch.
    ///
    /// # Errors
    /// The rank is not less than the number of ranks; there are too many workers or ranks; no epoch has a batch; the device
    /// does not exist; a thread cannot be started.
    pub fn new(source: Arc<dyn BatchSource>, options: &LoaderConfig) -> Result<Self> {
        let epochs = options.epochs;
        if epochs != Some(0) && Cursor::default().advanced(0, epochs, &*source)?.is_none() {
            return Err(cursor::no_batches(0, epochs.unwrap_or(1)));
        }
        Self::start(source, options, Cursor::default())
    }

    /// Creates a loader at a saved state, possibly of a loader with another number of ranks or workers, or on another
    /// device.
    ///
    /// # Errors
    /// Same as [`Loader::new`]; the state has another seed, another number of batches in its epoch, or other data or options.
    pub fn resume(source: Arc<dyn BatchSource>, options: &LoaderConfig, state: &LoaderState) -> Result<Self> {
        let refuse = |reason: String| Err(Error::Config { what: WHAT, reason });
        if source.seed() != state.seed {
            return refuse(format!(
                "the state has seed {}, but the data set has seed {}; use the same seed to resume",
                state.seed,
                source.seed()
            ));
        }
        let batches = source.batches(state.epoch) as u64;
        if batches != state.batches || state.position > batches {
            return refuse(format!(
                "the state is at batch {} of {} of epoch {}, but the data set has {batches}; resume with the same data and batch \
                 size",
                state.position, state.batches, state.epoch
            ));
        }
        if source.fingerprint() != state.fingerprint {
            return refuse(format!(
                "the state has other data or options (its fingerprint is {:016x}, that of the data set {:016x}); resume with the \
                 same data, strategy, batch size and other options",
                state.fingerprint,
                source.fingerprint()
            ));
        }
        Self::start(source, options, Cursor { epoch: state.epoch, position: state.position })
    }

    fn start(source: Arc<dyn BatchSource>, options: &LoaderConfig, cursor: Cursor) -> Result<Self> {
        let options = *options;
        if options.rank >= options.ranks {
            let reason = format!(
                "rank {} of {}; expected a rank from 0 to below the number of ranks",
                options.rank, options.ranks
            );
            return Err(Error::Config { what: WHAT, reason });
        }
        let most = |what: &str, has: u64, most: u64| {
            let reason = format!("{has} {what}; expected at most {most}");
            if has <= most { Ok(()) } else { Err(Error::Config { what: WHAT, reason }) }
        };
        most("workers", options.workers as u64, MOST_WORKERS)?;
        most("ranks", options.ranks, MOST_RANKS)?;
        // Checked here, so that a device that does not exist is not an error of a worker.
        let stream = match options.device {
            Device::Cpu => None,
            device => Some(Stream::new(device)?),
        };
        let queue = Arc::new(Queue::new(cursor, options.prefetch.max(1)));
        let builder = || Builder::new(source.clone(), &options, stream.clone());
        let mut loader = Self {
            inline: (options.workers == 0).then(builder),
            workers: Vec::with_capacity(options.workers),
            source: source.clone(),
            options,
            cursor,
            queue,
            finished: false,
            batches: 0,
            waited_seconds: 0.0,
        };
        for number in 0..options.workers {
            let (queue, mut builder) = (loader.queue.clone(), builder());
            let thread = std::thread::Builder::new().name(format!("loader {number}"));
            let spawned = thread.spawn(move || worker::run(&queue, &mut builder, &options));
            // Dropping the loader joins the threads already started.
            loader.workers.push(spawned.map_err(|cause| Error::Config {
                what: WHAT,
                reason: format!(
                    "worker {number} of {} cannot be started: {cause}; use fewer workers",
                    options.workers
                ),
            })?);
        }
        Ok(loader)
    }

    /// Returns the state after the last batch returned.
    pub fn state(&self) -> LoaderState {
        let Cursor { epoch, position } = self.cursor;
        let batches = self.source.batches(epoch) as u64;
        let (seed, fingerprint) = (self.source.seed(), self.source.fingerprint());
        LoaderState { seed, epoch, position, batches, fingerprint }
    }

    /// Returns the counters.
    pub fn stats(&self) -> LoaderStats {
        let worked_seconds =
            if self.options.workers == 0 { self.waited_seconds } else { self.queue.worked_seconds() };
        LoaderStats { batches: self.batches, waited_seconds: self.waited_seconds, worked_seconds }
    }

    fn take(&mut self) -> Option<Taken> {
        let Some(inline) = &mut self.inline else { return self.queue.take() };
        let mut after = self.cursor;
        let id = match inline.next_batch(&mut after, &self.options) {
            Ok(id) => id?,
            Err(error) => return Some(Taken { made: Err(error), after }),
        };
        Some(Taken { made: inline.make(id), after })
    }

    /// Makes the current stream wait for the copy of the batch, and keeps the memory of the batch until the current stream
    /// is done.
    fn arrive(&self, made: Made) -> Result<Batch> {
        if let Some(copied) = &made.copied {
            let current = Stream::current(self.options.device)?;
            current.wait(copied)?;
            // All tensors of a batch are views of one block.
            record_stream(&made.batch.tokens, &current)?;
        }
        Ok(made.batch)
    }
}

impl Iterator for Loader {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finished {
            return None;
        }
        let began = Instant::now();
        let taken = self.take();
        self.waited_seconds += began.elapsed().as_secs_f64();
        let Some(Taken { made, after }) = taken else {
            self.finished = true;
            return None;
        };
        let batch = made.and_then(|made| self.arrive(made));
        match &batch {
            Ok(_) => {
                self.cursor = after;
                self.batches += 1;
            }
            Err(_) => {
                self.finished = true;
                self.queue.stop();
            }
        }
        Some(batch)
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.queue.stop();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of the code it calls.
            let _ = worker.join();
        }
    }
}
