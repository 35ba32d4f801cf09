//! Batches made ahead of time by worker threads, in order, from where one left off.
//!
//! A batch is a pure function of (seed, epoch, index), see [`BatchSource`]. So the sequence of batches is the same for any
//! number of workers and any depth of prefetch, and the loader's whole state is where it stands in that sequence: the
//! integers of [`LoaderState`]. To resume replays nothing and takes as long as to begin.
//!
//! The global sequence is the batches of epoch 0, those of epoch 1, and so on. With `R` ranks, one *round* hands each
//! rank one batch: rank `r` takes the batch at `position + r`, and the position moves by `R`. A round may reach over the end
//! of an epoch, so that no rank is ever without a batch while another has one; only the last round of the last epoch is left
//! out where it is incomplete. An epoch without a batch is passed over. Because the position counts global batches, a run can resume with another number of ranks.
//!
//! On CUDA a worker writes into page-locked memory (unless [`LoaderOptions::pinned`] is off) and starts the copy to the device itself, on a stream of its own, so
//! that batches arrive while the model computes. On the CPU the batch's tensors are the memory that the worker wrote, and
//! the memory is used again when they are gone.

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

/// More threads than any machine has use for: a number beyond is a mistake.
const MOST_WORKERS: u64 = 1024;

/// A round goes through the epochs that it reaches over one by one.
const MOST_RANKS: u64 = 1 << 24;

/// How batches are made and handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Threads that make batches, at most 1024; 0: the caller makes each when it asks for it.
    pub workers: usize,
    /// Batches that are ready or being made beyond the one in hand, at least 1 with workers. More than there are: all.
    pub prefetch: usize,
    /// Where the batches go.
    pub device: Device,
    /// Whether batches for a CUDA device are written into page-locked memory, which the device copies from while the
    /// worker goes on. From ordinary memory the worker waits for each copy. No matter on the CPU.
    pub pinned: bool,
    /// This process among `ranks`.
    pub rank: u64,
    /// Processes that divide the batches, at most 2²⁴. They may be more than an epoch has batches.
    pub ranks: u64,
    /// Epochs to hand out; `None`: without end.
    pub epochs: Option<u64>,
}

impl Default for LoaderOptions {
    /// One worker, two batches ahead, on the CPU, page-locked memory for devices, one rank, one epoch.
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

/// Where a loader stands: the next batch of the global sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// The seed of every random choice.
    pub seed: u64,
    /// The epoch.
    pub epoch: u64,
    /// Batches of it that all ranks have had.
    pub position: u64,
    /// How many batches the epoch has.
    pub batches: u64,
    /// [`BatchSource::fingerprint`]: another one says that the data, or how it is batched, has changed.
    pub fingerprint: u64,
}

/// What a loader did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LoaderStats {
    /// Batches handed out.
    pub batches: u64,
    /// Seconds that the consumer waited for them; without workers, the time of making them.
    pub waited_seconds: f64,
    /// Seconds that all workers spent making batches, those not handed out yet included.
    pub worked_seconds: f64,
}

/// An iterator over batches.
///
/// After an error it ends; [`Loader::state`] then stands at the batch that failed. Dropping it stops and joins the threads;
/// each finishes at most the batch at hand.
///
/// ```
/// use std::sync::Arc;
///
/// use dataloading::{BatchOptions, Loader, LoaderOptions, StandardDataset};
///
/// let samples: Vec<Vec<u32>> = (1..100).map(|length| vec![7; length]).collect();
/// let options = BatchOptions { batch_size: 8, ..BatchOptions::default() };
/// let dataset = Arc::new(StandardDataset::new(samples, &options)?);
///
/// let mut loader = Loader::new(dataset.clone(), &LoaderOptions::default())?;
/// let first = loader.next().unwrap()?;
/// assert_eq!(first.counts.documents, 8);
///
/// let rest = Loader::resume(dataset, &LoaderOptions::default(), &loader.state())?;
/// assert_eq!(rest.count(), 12);
/// # Ok::<(), dataloading::Error>(())
/// ```
pub struct Loader {
    source: Arc<dyn BatchSource>,
    options: LoaderOptions,
    /// Behind the last batch that was handed out.
    cursor: Cursor,
    queue: Arc<Queue>,
    workers: Vec<JoinHandle<()>>,
    /// Makes batches where there are no workers.
    own: Option<Builder>,
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
    /// From the first batch on.
    ///
    /// # Errors
    /// A rank that is none of `ranks`; too many workers or ranks; epochs without a single batch; a device that is not there; no threads to be had.
    pub fn new(source: Arc<dyn BatchSource>, options: &LoaderOptions) -> Result<Self> {
        let epochs = options.epochs;
        if epochs != Some(0) && Cursor::default().advanced(0, epochs, &*source)?.is_none() {
            return Err(cursor::no_batches(0, epochs.unwrap_or(1)));
        }
        Self::start(source, options, Cursor::default())
    }

    /// From where another loader stood, perhaps one of another number of ranks, workers, or on another device.
    ///
    /// # Errors
    /// As [`Loader::new`]; a state of another seed, of an epoch of another number of batches, or of other data or options.
    pub fn resume(
        source: Arc<dyn BatchSource>,
        options: &LoaderOptions,
        state: &LoaderState,
    ) -> Result<Self> {
        let refuse = |reason: String| Err(Error::Config { what: WHAT, reason });
        if source.seed() != state.seed {
            return refuse(format!(
                "the state is of seed {} and the data set of seed {}; give it the same seed to resume",
                state.seed,
                source.seed()
            ));
        }
        let batches = source.batches(state.epoch) as u64;
        if batches != state.batches || state.position > batches {
            return refuse(format!(
                "the state stands at batch {} of {} of epoch {}, and the data set has {batches} there; resume with the data \
                 and the batch size that the state is of",
                state.position, state.batches, state.epoch
            ));
        }
        if source.fingerprint() != state.fingerprint {
            return refuse(format!(
                "the state is of other data, or of other options (its fingerprint is {:016x}, the data set's {:016x}); resume \
                 with the data, the strategy, the batch size and all other options that the state is of",
                state.fingerprint,
                source.fingerprint()
            ));
        }
        Self::start(source, options, Cursor { epoch: state.epoch, position: state.position })
    }

    fn start(source: Arc<dyn BatchSource>, options: &LoaderOptions, cursor: Cursor) -> Result<Self> {
        let options = *options;
        if options.rank >= options.ranks {
            let reason = format!("rank {} of {}; ranks count from 0", options.rank, options.ranks);
            return Err(Error::Config { what: WHAT, reason });
        }
        let most = |what: &str, has: u64, most: u64| {
            let reason = format!("{has} {what}; expected at most {most}");
            if has <= most { Ok(()) } else { Err(Error::Config { what: WHAT, reason }) }
        };
        most("workers", options.workers as u64, MOST_WORKERS)?;
        most("ranks", options.ranks, MOST_RANKS)?;
        // A device that is not there is found here, not by a worker.
        let stream = match options.device {
            Device::Cpu => None,
            device => Some(Stream::new(device)?),
        };
        let queue = Arc::new(Queue::new(cursor, options.prefetch.max(1)));
        let builder = || Builder::new(source.clone(), &options, stream.clone());
        let mut loader = Self {
            own: (options.workers == 0).then(builder),
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
            // Dropping the loader joins those that were started.
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

    /// Where the loader stands: behind the last batch that it handed out.
    pub fn state(&self) -> LoaderState {
        let Cursor { epoch, position } = self.cursor;
        let batches = self.source.batches(epoch) as u64;
        let (seed, fingerprint) = (self.source.seed(), self.source.fingerprint());
        LoaderState { seed, epoch, position, batches, fingerprint }
    }

    /// What it did so far.
    pub fn stats(&self) -> LoaderStats {
        let worked_seconds =
            if self.options.workers == 0 { self.waited_seconds } else { self.queue.worked_seconds() };
        LoaderStats { batches: self.batches, waited_seconds: self.waited_seconds, worked_seconds }
    }

    fn take(&mut self) -> Option<Taken> {
        let Some(own) = &mut self.own else { return self.queue.take() };
        let mut after = self.cursor;
        let place = match own.next_place(&mut after, &self.options) {
            Ok(place) => place?,
            Err(error) => return Some(Taken { made: Err(error), after }),
        };
        Some(Taken { made: own.make(place), after })
    }

    /// Makes the current stream wait for the batch's copy, and the batch's memory for the current stream.
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
            // A worker catches the panics of what it runs.
            let _ = worker.join();
        }
    }
}
