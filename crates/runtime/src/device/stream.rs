//! Streams: queues of work on a device.

use std::sync::Arc;

use tch::{Device, Tensor};

use super::choice::{checked, flag};
use super::event::{Event, Failure, Recorded};
use super::worker::{Worker, caught};
use crate::error::{Error, Result};
use crate::sys::stream::{CudaStream, CudaStreamGuard};

/// A queue of work on a device, executed in order and asynchronously to the caller.
///
/// | | CUDA | CPU | CPU, [`Stream::current`] |
/// |---|---|---|---|
/// | a stream is | one of libtorch's pool of 32 for each device and priority | a thread of its own with a queue | the calling thread |
/// | [`submit`](Stream::submit) | runs the closure at once; the kernels it launches are queued | queues the closure | runs the closure |
/// | an error or panic of the closure | comes from `submit` | comes from the next [`synchronize`](Stream::synchronize) | comes from `submit` |
/// | [`wait`](Stream::wait) | holds back later kernels | holds back later closures | blocks the thread |
///
/// After a failure a CPU stream skips the work behind it in the queue, so that nothing computes on data that was never written;
/// events recorded meanwhile carry the failure, and a stream that waits for one fails too. The next `synchronize` of the stream
/// returns the failure once, and work submitted after it runs again.
///
/// Clones of a handle are the same stream. Dropping the last one finishes the queued work and joins the thread; within
/// the work of a CPU stream it does not wait. A failure that was never returned by `synchronize` is lost with its
/// stream. The queue is unbounded: a producer that runs far ahead should wait for an event now and then.
///
/// ```
/// use runtime::device::{Event, Stream};
/// use tch::{Device, Tensor, kind};
///
/// let copy = Stream::new(Device::Cpu)?;
/// let source = Tensor::arange(4, kind::FLOAT_CPU);
/// let target = Tensor::zeros([4], kind::FLOAT_CPU);
/// let copied = Event::new(Device::Cpu)?;
/// let mut inside = target.shallow_clone();
/// copy.submit(move || Ok(inside.f_copy_(&source)?))?;
/// copy.record(&copied)?;
///
/// // The calling thread computes only after the copy.
/// Stream::current(Device::Cpu)?.wait(&copied)?;
/// assert_eq!(f64::try_from(target.f_sum(tch::Kind::Float)?)?, 6.0);
/// # Ok::<(), runtime::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Stream {
    device: Device,
    kind: Kind,
}

#[derive(Debug, Clone)]
enum Kind {
    /// The calling thread.
    Caller,
    /// A thread with a queue.
    Worker(Arc<Worker>),
    Cuda(CudaStream),
}

/// Makes a CUDA stream current on a thread while it lives. Not `Send`.
#[derive(Debug)]
#[must_use = "the former stream is current again when the guard is dropped"]
pub struct StreamGuard {
    _guard: Option<CudaStreamGuard>,
}

impl Stream {
    /// Creates a stream.
    ///
    /// # Errors
    /// A device that does not exist; a thread that cannot be started.
    pub fn new(device: Device) -> Result<Self> {
        Self::with_priority(device, false)
    }

    /// As [`Stream::new`]; on CUDA its kernels have priority over those of ordinary streams. On the CPU there is no
    /// difference.
    ///
    /// # Errors
    /// As [`Stream::new`].
    pub fn high_priority(device: Device) -> Result<Self> {
        Self::with_priority(device, true)
    }

    fn with_priority(device: Device, high: bool) -> Result<Self> {
        let kind = match checked(device)? {
            None => Kind::Worker(Arc::new(Worker::spawn()?)),
            Some(index) => Kind::Cuda(CudaStream::new(index, high)?),
        };
        Ok(Self { device, kind })
    }

    /// Returns the stream of this thread's own operations: on CUDA the current stream of the device, on the CPU the
    /// thread that calls the methods.
    ///
    /// # Errors
    /// A device that does not exist.
    pub fn current(device: Device) -> Result<Self> {
        let kind = match checked(device)? {
            None => Kind::Caller,
            Some(index) => Kind::Cuda(CudaStream::current(index)?),
        };
        Ok(Self { device, kind })
    }

    /// Returns the stream's device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Queues work. On a CPU stream it runs with the caller's grad mode, autocast and other thread-local state of
    /// libtorch.
    ///
    /// On CUDA, memory that the work uses and that was allocated on another stream needs
    /// [`record_stream`](super::record_stream).
    ///
    /// # Errors
    /// On CUDA and on the calling thread, the closure's own error, or its panic as [`Error::Stream`]; a CPU stream returns both
    /// from the next [`synchronize`](Stream::synchronize).
    pub fn submit(&self, work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        match &self.kind {
            Kind::Caller => at_once(work),
            Kind::Worker(worker) => worker.submit(Box::new(work)),
            Kind::Cuda(stream) => {
                let _current = stream.enter()?;
                at_once(work)
            }
        }
    }

    /// Records the event behind the current work of the stream.
    ///
    /// # Errors
    /// An event of another device.
    pub fn record(&self, event: &Event) -> Result<()> {
        if event.device() != self.device {
            return Err(Error::invalid(
                "stream record",
                format!(
                    "the event is of {} and the stream of {}; make the event for the stream's device",
                    flag(event.device()),
                    flag(self.device)
                ),
            ));
        }
        match &self.kind {
            Kind::Caller => event.mark(|mark| mark.complete(None)),
            Kind::Worker(worker) => event.mark(|mark| worker.complete(mark)),
            Kind::Cuda(stream) => event.record_cuda(*stream)?,
        }
        Ok(())
    }

    /// Makes later work of this stream wait for the event's latest recording at the time of this call. Returns
    /// immediately, except on the calling thread's stream, and on a CUDA stream for an event of the CPU: these block.
    ///
    /// # Errors
    /// The failure that the event carries, if the call blocks; otherwise a CPU stream fails as if its own work had
    /// failed.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let Some(recorded) = event.latest() else { return Ok(()) };
        match (&self.kind, recorded) {
            (Kind::Worker(worker), recorded) => worker.wait(recorded),
            (Kind::Cuda(stream), Recorded::Cuda(event)) => event.block(*stream)?,
            (Kind::Caller | Kind::Cuda(_), recorded) => recorded.wait()?,
        }
        Ok(())
    }

    /// Blocks the calling thread until all work of the stream is done.
    ///
    /// # Errors
    /// [`Error::Stream`], once, with the error of the first work that failed since the last call ([`Error::Collective`] as it is); on
    /// CUDA, an asynchronous error of a kernel. A call from within the stream's own work is refused.
    pub fn synchronize(&self) -> Result<()> {
        match &self.kind {
            Kind::Caller => Ok(()),
            Kind::Worker(worker) => worker.synchronize(),
            Kind::Cuda(stream) => stream.synchronize(),
        }
    }

    /// Returns whether all work of the stream is done.
    ///
    /// # Errors
    /// On CUDA, an asynchronous error of a kernel.
    pub fn query(&self) -> Result<bool> {
        match &self.kind {
            Kind::Caller => Ok(true),
            Kind::Worker(worker) => Ok(worker.idle()),
            Kind::Cuda(stream) => stream.query(),
        }
    }

    /// Makes a CUDA stream and its device current on this thread until the guard is dropped. Has no effect for
    /// [`Stream::current`] of the CPU.
    ///
    /// # Errors
    /// A CPU stream with its own thread, which runs only what is submitted.
    pub fn enter(&self) -> Result<StreamGuard> {
        match &self.kind {
            Kind::Caller => Ok(StreamGuard { _guard: None }),
            Kind::Cuda(stream) => Ok(StreamGuard { _guard: Some(stream.enter()?) }),
            Kind::Worker(_) => Err(Error::invalid(
                "stream enter",
                "a CPU stream has a thread of its own and cannot be made current on this one; use submit",
            )),
        }
    }

    /// See [`record_stream`](super::record_stream).
    pub(super) fn keep(&self, tensor: &Tensor) -> Result<()> {
        match &self.kind {
            Kind::Caller => Ok(()),
            Kind::Worker(worker) => {
                worker.keep(tensor.shallow_clone());
                Ok(())
            }
            Kind::Cuda(stream) => stream.keep(tensor),
        }
    }
}

/// Runs work on this thread; a panic becomes an error.
fn at_once(work: impl FnOnce() -> Result<()>) -> Result<()> {
    let mut own_error = None;
    let outcome = caught(|| {
        own_error = work().err();
        Ok(())
    });
    outcome.map_err(|cause| Failure::of_work(cause).to_error())?;
    own_error.map_or(Ok(()), Err)
}
