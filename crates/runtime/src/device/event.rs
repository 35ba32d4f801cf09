//! Events: marks in a stream that other streams and the host can wait for, and the time between two of them.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tch::Device;

use super::choice::{checked, flag};
use super::worker::is_worker;
use crate::collectives::CollectiveError;
use crate::error::{Error, Result};
use crate::sys::stream::CudaEvent;

/// A mark in a stream.
///
/// [`Stream::record`](super::Stream::record) puts it behind the current work of the stream; it is complete when that work is. An
/// event that was never recorded is complete. Recording it again creates a new mark; earlier waits still wait for the old one.
///
/// A mark behind failed work carries the failure: waiting for it fails too, so that nothing computes on data that was
/// never written.
#[derive(Debug)]
pub struct Event {
    device: Device,
    timed: bool,
    latest: Mutex<Option<Recorded>>,
}

/// One recording of an event.
#[derive(Debug, Clone)]
pub(super) enum Recorded {
    /// On a worker thread, or on the caller's.
    Host(Arc<Mark>),
    /// On a CUDA stream.
    Cuda(Arc<CudaEvent>),
}

/// A mark that a thread completes.
#[derive(Debug, Default)]
pub(super) struct Mark {
    outcome: Mutex<Option<Outcome>>,
    done: Condvar,
}

#[derive(Debug, Clone)]
pub(super) struct Outcome {
    at: Instant,
    pub(super) failure: Option<Arc<Failure>>,
}

/// Why work failed or was skipped.
#[derive(Debug)]
pub(super) struct Failure {
    cause: Cause,
    inherited: bool,
}

/// Cause of a failure.
#[derive(Debug, Clone)]
pub(super) enum Cause {
    /// The message of an error or panic.
    Message(String),
    /// A group's failure, which says by itself what failed and where.
    Collective(Box<CollectiveError>),
}

impl Failure {
    pub(super) fn of_work(cause: Cause) -> Arc<Self> {
        Arc::new(Self { cause, inherited: false })
    }

    /// Returns the failure of a stream that waited for a mark with this failure.
    pub(super) fn inherit(&self) -> Arc<Self> {
        Arc::new(Self { cause: self.cause.clone(), inherited: true })
    }

    pub(super) fn to_error(&self) -> Error {
        let via =
            if self.inherited { "an event that it waited for carries an earlier failure: " } else { "" };
        match &self.cause {
            Cause::Message(message) => Error::Stream(format!("{via}{message}")),
            Cause::Collective(failure) => Error::Collective(failure.clone()),
        }
    }
}

impl Mark {
    pub(super) fn complete(&self, failure: Option<Arc<Failure>>) {
        *self.lock() = Some(Outcome { at: Instant::now(), failure });
        self.done.notify_all();
    }

    pub(super) fn wait(&self) -> Outcome {
        let mut outcome = self.lock();
        loop {
            if let Some(outcome) = &*outcome {
                return outcome.clone();
            }
            outcome = self.done.wait(outcome).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Outcome>> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recorded {
    /// Blocks this thread until the mark is complete.
    pub(super) fn wait(&self) -> Result<()> {
        match self {
            Self::Host(mark) => mark.wait().failure.map_or(Ok(()), |failure| Err(failure.to_error())),
            Self::Cuda(event) => wait_for(event),
        }
    }

    fn query(&self) -> Result<bool> {
        match self {
            Self::Host(mark) => Ok(mark.lock().is_some()),
            Self::Cuda(event) => event.query(),
        }
    }
}

/// Waits for a mark of a device. libtorch's own wait polls and occupies a core, which is fastest for short work; the threads of CPU
/// streams wait for long work while others need the core, so they poll with pauses.
pub(super) fn wait_for(event: &CudaEvent) -> Result<()> {
    let mut pause = SHORTEST_PAUSE;
    while is_worker() && !event.query()? {
        thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    event.synchronize()
}

const SHORTEST_PAUSE: Duration = Duration::from_micros(10);
/// About 1 % of the time of a layer.
const LONGEST_PAUSE: Duration = Duration::from_micros(100);

impl Event {
    /// Creates an event with timing, for streams of `device`.
    ///
    /// # Errors
    /// A device that does not exist.
    pub fn new(device: Device) -> Result<Self> {
        Self::with_timing(device, true)
    }

    /// Creates an event without timing, for order alone; on CUDA cheaper to wait for.
    ///
    /// # Errors
    /// A device that does not exist.
    pub fn untimed(device: Device) -> Result<Self> {
        Self::with_timing(device, false)
    }

    fn with_timing(device: Device, timed: bool) -> Result<Self> {
        checked(device)?;
        Ok(Self { device, timed, latest: Mutex::new(None) })
    }

    /// Returns the device whose streams record it.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns whether the latest recording is complete; true if there is none.
    ///
    /// # Errors
    /// Errors of CUDA, including those of earlier kernels.
    pub fn query(&self) -> Result<bool> {
        self.latest().map_or(Ok(true), |recorded| recorded.query())
    }

    /// Blocks the calling thread until the latest recording is complete.
    ///
    /// # Errors
    /// The failure of work before the mark, which the stream's own `synchronize` returns again.
    pub fn synchronize(&self) -> Result<()> {
        self.latest().map_or(Ok(()), |recorded| recorded.wait())
    }

    /// Returns the seconds from the completion of this event to that of `end`; negative if `end` came first. On CUDA it
    /// is the device's own time, with a resolution of about 0.5 µs.
    ///
    /// # Errors
    /// An event that is untimed, of another device, never recorded or not complete; work before it that failed.
    ///
    /// ```
    /// use runtime::device::{Event, Stream};
    /// use tch::Device;
    ///
    /// let stream = Stream::new(Device::Cpu)?;
    /// let (start, end) = (Event::new(Device::Cpu)?, Event::new(Device::Cpu)?);
    /// stream.record(&start)?;
    /// stream.submit(|| Ok(()))?;
    /// stream.record(&end)?;
    /// end.synchronize()?;
    /// assert!(start.elapsed(&end)? >= 0.0);
    /// # Ok::<(), runtime::Error>(())
    /// ```
    pub fn elapsed(&self, end: &Event) -> Result<f64> {
        if self.device != end.device {
            return Err(Error::invalid(
                "event elapsed",
                format!("the start is of {} and the end of {}", flag(self.device), flag(end.device)),
            ));
        }
        match (self.measurable("start")?, end.measurable("end")?) {
            (Recorded::Cuda(start), Recorded::Cuda(end)) => start.elapsed(&end),
            (Recorded::Host(start), Recorded::Host(end)) => {
                let (start, end) = (start.wait(), end.wait());
                if let Some(failure) = start.failure.or(end.failure) {
                    return Err(failure.to_error());
                }
                Ok(match end.at.checked_duration_since(start.at) {
                    Some(duration) => duration.as_secs_f64(),
                    None => -start.at.duration_since(end.at).as_secs_f64(),
                })
            }
            // Both are from one device, and a device has one kind of recording.
            _ => Err(Error::invalid("event elapsed", "the events are of different kinds")),
        }
    }

    /// Returns the latest recording if its time can be read without waiting.
    fn measurable(&self, which: &str) -> Result<Recorded> {
        let reason = match self.latest() {
            _ if !self.timed => "was made without timing; make it with Event::new",
            None => "was never recorded; record it on a stream first",
            Some(recorded) if recorded.query()? => return Ok(recorded),
            Some(_) => "is not complete; call synchronize on it first",
        };
        Err(Error::invalid("event elapsed", format!("the {which} event {reason}")))
    }

    pub(super) fn latest(&self) -> Option<Recorded> {
        self.lock().clone()
    }

    /// Sets a new mark as the latest recording. `publish` gets it under the event's lock, so that two threads that
    /// record the same event leave it with the mark of one of them.
    pub(super) fn mark<R>(&self, publish: impl FnOnce(Arc<Mark>) -> R) -> R {
        let mut latest = self.lock();
        let mark = Arc::new(Mark::default());
        *latest = Some(Recorded::Host(mark.clone()));
        publish(mark)
    }

    /// Records a CUDA event as the latest recording; reuses the current one if nothing waits for it.
    pub(super) fn record_cuda(&self, stream: crate::sys::stream::CudaStream) -> Result<()> {
        let mut latest = self.lock();
        if let Some(Recorded::Cuda(event)) = &mut *latest
            && let Some(event) = Arc::get_mut(event)
        {
            return event.record(stream);
        }
        let mut event = CudaEvent::new(self.timed)?;
        event.record(stream)?;
        *latest = Some(Recorded::Cuda(Arc::new(event)));
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Recorded>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
