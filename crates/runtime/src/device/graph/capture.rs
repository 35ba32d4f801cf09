//! Capturing the steps of a loop.

use std::cell::Cell;
use std::marker::PhantomData;

use tch::Device;

use crate::device::choice::checked;
use crate::device::{Stream, synchronize};
use crate::error::{Error, Result};
use crate::memory::empty_cache;
use crate::sys::graph::CudaGraph;
use crate::sys::recorder::{self, Recording};

/// Captures a step at its second run. See the [module](super).
///
/// ```
/// use runtime::device::graph::Capture;
/// use tch::{Tensor, kind::FLOAT_CPU};
///
/// let (x, mut sum) = (Tensor::ones([3], FLOAT_CPU), Tensor::zeros([3], FLOAT_CPU));
/// let mut capture = Capture::recorder();
/// let mut step = || -> runtime::Result<()> { sum.f_add_(&(&x * 2.0)).map(drop)?; Ok(()) };
/// assert!(capture.run(None, &mut step)?.1.is_none());
/// let mut graph = capture.run(None, &mut step)?.1.expect("the second run is captured");
/// graph.replay()?;
/// drop(step);
/// assert_eq!(sum, Tensor::from_slice(&[6.0f32, 6.0, 6.0]));
/// # Ok::<(), runtime::Error>(())
/// ```
#[derive(Debug)]
pub struct Capture(Backend);

#[derive(Debug)]
enum Backend {
    /// A side stream, which has run the step if `warm`.
    Cuda { device: Device, stream: Stream, warm: Cell<bool> },
    /// The first run.
    Recorder { first: Option<Recording> },
}

impl Capture {
    /// Captures CUDA graphs.
    ///
    /// # Errors
    /// [`Error::Unavailable`] on a CPU and without CUDA.
    pub fn new(device: Device) -> Result<Self> {
        if checked(device)?.is_none() {
            return Err(Error::Unavailable {
                what: "a captured step".into(),
                reason: "a graph of launches exists on CUDA devices alone; call the step itself, whose launches are calls on \
                         a CPU"
                    .into(),
            });
        }
        Ok(Self(Backend::Cuda { device, stream: Stream::new(device)?, warm: Cell::new(false) }))
    }

    /// Records operators instead, on a CPU, as a graph's stand-in for tests. It keeps every tensor of the step.
    pub fn recorder() -> Self {
        Self(Backend::Recorder { first: None })
    }

    /// Runs `body`, which computes in any case. Returns its value and, at the second run, the graph. A graph gets its memory from
    /// the pool `shared`, if given: graphs of one pool must never run at the same time, nor need what another left in it.
    ///
    /// # Errors
    /// What `body` returns; a call in `body` that cannot be captured; on CUDA, another libtorch than the one that this was built for; in a
    /// recording, two runs that differ in more than the content of tensors. A second run that failed on CUDA has not computed.
    pub fn run<T, E: From<Error>>(
        &mut self,
        shared: Option<Pool>,
        body: impl FnOnce() -> Result<T, E>,
    ) -> Result<(T, Option<Graph>), E> {
        match &mut self.0 {
            Backend::Cuda { warm, .. } if !warm.get() => Ok((self.warm_up(body)?, None)),
            Backend::Cuda { .. } => {
                let (value, mut graph) = self.capture(shared, body)?;
                graph.replay()?;
                Ok((value, Some(graph)))
            }
            Backend::Recorder { first } => {
                let mut recording = Recording::new()?;
                let value = {
                    let _progress = ProgressGuard::enter(Progress::WarmUp);
                    recording.record(body)?
                };
                let Some(earlier) = first.take() else {
                    *first = Some(recording);
                    return Ok((value, None));
                };
                earlier.compare(&recording)?;
                Ok((value, Some(Graph(Launches::Recorded(recording)))))
            }
        }
    }

    /// Runs `body` on the stream of the capture, without capturing it.
    fn warm_up<T, E: From<Error>>(&self, body: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let Backend::Cuda { device, stream, warm } = &self.0 else { return body() };
        // Another stream may still be writing what the step uses, and the next one will read what it writes.
        synchronize(*device)?;
        let value = {
            let _current = stream.enter()?;
            let _progress = ProgressGuard::enter(Progress::WarmUp);
            body()?
        };
        synchronize(*device)?;
        warm.set(true);
        Ok(value)
    }

    /// Captures a run of `body` on CUDA, which does not compute.
    fn capture<T, E: From<Error>>(
        &self,
        shared: Option<Pool>,
        body: impl FnOnce() -> Result<T, E>,
    ) -> Result<(T, Graph), E> {
        let Backend::Cuda { device, stream, .. } = &self.0 else {
            return Err(Error::invalid("capture", "a recording has no stream").into());
        };
        synchronize(*device)?;
        // The pool gets its memory from the driver.
        empty_cache(*device)?;
        let _current = stream.enter()?;
        // Declared after the guard, so that it is dropped first: a capture must end on its own stream, also after a
        // panic.
        let mut graph = CudaGraph::new().map_err(|error| Error::Unavailable {
            what: "a captured step".into(),
            reason: format!(
                "{error}; install the libtorch that this was built for (in a checkout, `cargo xtask setup --cuda`)"
            ),
        })?;
        graph.begin(shared.map(|Pool(pool)| pool))?;
        let captured = {
            let _progress = ProgressGuard::enter(Progress::Capturing);
            body()
        };
        let ended = graph.end();
        let value = captured?;
        ended?;
        Ok((value, Graph(Launches::Cuda { graph, device: *device })))
    }
}

/// A captured step. What it computes from and into must exist as long as it does.
#[derive(Debug)]
pub struct Graph(Launches);

#[derive(Debug)]
enum Launches {
    Cuda { graph: CudaGraph, device: Device },
    Recorded(Recording),
}

impl Graph {
    /// Launches the step again on the current stream of this thread. Returns before it is done.
    ///
    /// # Errors
    /// A failure of the launch; on CUDA, an asynchronous error of an earlier kernel.
    pub fn replay(&mut self) -> Result<()> {
        match &mut self.0 {
            Launches::Cuda { graph, .. } => graph.replay(),
            Launches::Recorded(recording) => recording.replay(),
        }
    }

    /// Returns the number of operators of a recording; `None` on CUDA, where launches are not counted.
    pub fn operators(&self) -> Option<u64> {
        match &self.0 {
            Launches::Cuda { .. } => None,
            Launches::Recorded(recording) => Some(recording.operators()),
        }
    }

    /// Returns the memory pool of the graph, which exists as long as one of its graphs; `None` for a recording.
    ///
    /// # Errors
    /// Another libtorch than the one that this was built for.
    pub fn pool(&self) -> Result<Option<Pool>> {
        match &self.0 {
            Launches::Cuda { graph, .. } => Ok(Some(Pool(graph.pool()?))),
            Launches::Recorded(_) => Ok(None),
        }
    }
}

/// The memory pool of captured graphs.
#[derive(Debug, Clone, Copy)]
pub struct Pool([u64; 2]);

impl Drop for Graph {
    fn drop(&mut self) {
        if let Launches::Cuda { device, .. } = &self.0 {
            // A replay may still use what is freed here. A drop cannot return an error.
            let _ = synchronize(*device);
        }
    }
}

/// How far the capture of the step that this thread runs has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The step is not captured.
    Eager,
    /// It computes, and a graph will repeat it.
    WarmUp,
    /// A CUDA graph gets its launches.
    Capturing,
}

/// Returns the progress of this thread's step.
pub(crate) fn progress() -> Progress {
    PROGRESS.get()
}

/// Sets the progress back when dropped.
pub(crate) struct ProgressGuard(Progress);

impl ProgressGuard {
    pub(crate) fn enter(progress: Progress) -> Self {
        Self(PROGRESS.replace(progress))
    }
}

impl Drop for ProgressGuard {
    fn drop(&mut self) {
        PROGRESS.set(self.0);
    }
}

thread_local! {
    static PROGRESS: Cell<Progress> = const { Cell::new(Progress::Eager) };
    static OPERATORS_ONLY: Cell<u32> = const { Cell::new(0) };
}

/// Returns whether kernels of this thread have to be libtorch's operators, because a recording cannot repeat other code.
pub fn operators_only() -> bool {
    OPERATORS_ONLY.get() > 0 || recorder::is_recording()
}

/// While one of these exists, [`operators_only`] holds on its thread: steps then have the bits of recorded ones.
#[derive(Debug)]
#[must_use = "kernels are chosen as before once the guard is dropped"]
pub struct OperatorsOnly(PhantomData<*mut ()>);

impl OperatorsOnly {
    /// Begins.
    pub fn enter() -> Self {
        OPERATORS_ONLY.set(OPERATORS_ONLY.get() + 1);
        Self(PhantomData)
    }
}

impl Drop for OperatorsOnly {
    fn drop(&mut self) {
        OPERATORS_ONLY.set(OPERATORS_ONLY.get() - 1);
    }
}
