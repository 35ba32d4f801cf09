//! Kineto traces: a session records the operators, autograd nodes and ranges of all threads, and saves them as JSON for Perfetto.
//!
//! Unlike `torch.profiler` it has no schedule of steps: it records from [`Trace::start`] to [`Trace::save`].

use std::fs::File;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};
use crate::sys::profile as sys;

/// Kineto records for one session at a time in a process.
static RUNNING: AtomicBool = AtomicBool::new(false);

/// Options of a [`Trace`]: what to record besides the times of operators and ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceConfig {
    /// Whether to record the kernels and copies of CUDA devices, if there are any.
    pub cuda: bool,
    /// Whether to record the shapes of operators' inputs.
    pub shapes: bool,
    /// Whether to record each allocation and release of the thread that starts the trace and of the autograd engine, as `[memory]`
    /// events with bytes.
    pub memory: bool,
}

impl Default for TraceConfig {
    fn default() -> Self {
        Self { cuda: true, shapes: true, memory: true }
    }
}

/// A profiling session, which records all threads until it is saved or dropped.
///
/// The threads of the autograd engine are included. A session must stay on the thread that started it.
#[derive(Debug)]
#[must_use = "a trace that is dropped at once records nothing"]
pub struct Trace {
    running: Running,
}

impl Trace {
    /// Starts recording.
    ///
    /// # Errors
    /// [`Error::Invalid`] if another trace runs, and [`Error::Torch`] if libtorch cannot start one.
    pub fn start(options: TraceConfig) -> Result<Self> {
        if RUNNING.swap(true, Ordering::AcqRel) {
            let reason = "another trace is running in this process; save it or drop it first";
            return Err(Error::invalid("Trace::start", reason));
        }
        let TraceConfig { cuda, shapes, memory } = options;
        let started = crate::device::cuda_count()
            .and_then(|devices| sys::start_trace(cuda && devices > 0, shapes, memory));
        if let Err(error) = started {
            RUNNING.store(false, Ordering::Release);
            return Err(error);
        }
        Ok(Self { running: Running { stopped: false, _on_this_thread: PhantomData } })
    }

    /// Waits for all CUDA devices, stops recording, and writes the trace as JSON in Chrome's format, which
    /// <https://ui.perfetto.dev> and `chrome://tracing` open. A path that ends in `.gz` is written as plain text too.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written; the trace is lost then. [`Error::Torch`] if libtorch fails.
    pub fn save(mut self, path: &Path) -> Result<()> {
        // Kineto only logs a failed write. So the file is created here first, and its size is checked at the end.
        let io = |cause| Error::Io { path: path.to_owned(), cause };
        let writable = File::create(path).map_err(io);
        let result = self.running.stop()?;
        writable?;
        result.save(path)?;
        let size = std::fs::metadata(path).map_err(io)?.len();
        if size == 0 {
            return Err(io(std::io::Error::other("Kineto wrote nothing; its log on stderr says why")));
        }
        Ok(())
    }
}

/// Stops the session when it is dropped, so that a panic or an early return leaves the profiler free.
#[derive(Debug)]
struct Running {
    stopped: bool,
    _on_this_thread: PhantomData<*const ()>,
}

impl Running {
    fn stop(&mut self) -> Result<sys::TraceResult> {
        for index in 0..crate::device::cuda_count()? {
            crate::device::synchronize(tch::Device::Cuda(index))?;
        }
        self.stopped = true;
        let result = sys::stop_trace();
        RUNNING.store(false, Ordering::Release);
        result
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.stopped {
            let _ = self.stop();
        }
    }
}
