//! CUDA graphs (`cpp/graph.cpp`).

use std::marker::PhantomData;

use super::{Status, check};
use crate::error::Result;

/// An opaque object of the shim.
#[repr(C)]
struct Opaque {
    _private: [u8; 0],
}

unsafe extern "C" {
    fn rt_graph_new(out: *mut *mut Opaque) -> Status;
    fn rt_graph_free(graph: *mut Opaque);
    fn rt_graph_begin(graph: *mut Opaque, pool: *const u64) -> Status;
    fn rt_graph_pool(graph: *mut Opaque, pool: *mut u64) -> Status;
    fn rt_graph_end(graph: *mut Opaque) -> Status;
    fn rt_graph_restart(graph: *mut Opaque) -> Status;
    fn rt_graph_replay(graph: *mut Opaque) -> Status;
}

/// A CUDA graph of libtorch. Stays on the thread that made it: libtorch's class takes no lock.
#[derive(Debug)]
pub(crate) struct CudaGraph {
    graph: *mut Opaque,
    capturing: bool,
    _thread: PhantomData<*mut ()>,
}

/// The calls that end a capture.
trait Capture {
    /// `CUDAGraph::capture_end` of libtorch.
    fn end(&mut self) -> Result<()>;
    /// Begins an empty capture on the same stream without telling libtorch.
    fn restart(&mut self) -> Result<()>;
}

/// Ends a capture, also an invalid one.
///
/// If a call that cannot be captured has made the capture invalid, or its streams were not joined, CUDA ends the capture with an error,
/// and libtorch's `capture_end` returns this error before it has told its allocators. They would count the capture as running, and
/// never again reuse a block that another stream has used. So libtorch gets an empty capture to end.
fn end(capture: &mut impl Capture) -> Result<()> {
    let Err(failure) = capture.end() else { return Ok(()) };
    if capture.restart().is_ok() {
        let _ = capture.end();
    }
    Err(failure)
}

/// The shim's functions for a graph.
struct Shim(*mut Opaque);

impl Capture for Shim {
    fn end(&mut self) -> Result<()> {
        // SAFETY: the graph is that of a `CudaGraph`, which outlives this.
        unsafe { check(rt_graph_end(self.0)) }
    }

    fn restart(&mut self) -> Result<()> {
        // SAFETY: as above.
        unsafe { check(rt_graph_restart(self.0)) }
    }
}

impl CudaGraph {
    /// Returns an empty graph. The caller has checked that CUDA is available. An error if this libtorch does not have the class.
    pub(crate) fn new() -> Result<Self> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the out-parameter is valid during the call.
        unsafe { check(rt_graph_new(&mut graph)) }?;
        Ok(Self { graph, capturing: false, _thread: PhantomData })
    }

    /// Captures the work of the thread's current stream, until [`CudaGraph::end`], with memory from `pool`, if given, else from a new one.
    pub(crate) fn begin(&mut self, pool: Option<[u64; 2]>) -> Result<()> {
        let pool = pool.unwrap_or_default();
        // SAFETY: the graph is ours, and the two numbers exist during the call.
        unsafe { check(rt_graph_begin(self.graph, pool.as_ptr())) }?;
        self.capturing = true;
        Ok(())
    }

    /// Returns the pool of a captured graph.
    pub(crate) fn pool(&self) -> Result<[u64; 2]> {
        let mut pool = [0; 2];
        // SAFETY: the graph is ours, and the two numbers are written during the call.
        unsafe { check(rt_graph_pool(self.graph, pool.as_mut_ptr())) }?;
        Ok(pool)
    }

    /// Ends the capture, also on failure.
    pub(crate) fn end(&mut self) -> Result<()> {
        self.capturing = false;
        end(&mut Shim(self.graph))
    }

    /// Launches what was captured on the current stream.
    pub(crate) fn replay(&mut self) -> Result<()> {
        // SAFETY: the graph is ours; libtorch refuses one whose capture has not ended.
        unsafe { check(rt_graph_replay(self.graph)) }
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if self.capturing {
            // Only after a panic; the error of a discarded capture is ignored.
            let _ = self.end();
        }
        // SAFETY: the graph is ours and freed once.
        unsafe { rt_graph_free(self.graph) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    /// The state of a stream.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Capturing {
        No,
        Yes,
        /// After a call that cannot be captured.
        Invalid,
    }

    /// A model of libtorch's `CUDAGraph::capture_end`: CUDA ends the stream's capture in any case, and libtorch ends its allocators'
    /// capture only if CUDA returned no error.
    struct Model {
        stream: Capturing,
        allocators_capture: bool,
        ended: bool,
        restarts: bool,
    }

    impl Capture for Model {
        fn end(&mut self) -> Result<()> {
            let was = std::mem::replace(&mut self.stream, Capturing::No);
            if was != Capturing::Yes {
                return Err(Error::Torch(format!("the stream's capture was {was:?}")));
            }
            self.allocators_capture = false;
            self.ended = true;
            Ok(())
        }

        fn restart(&mut self) -> Result<()> {
            if !self.restarts || self.stream != Capturing::No {
                return Err(Error::Torch("no restart".into()));
            }
            self.stream = Capturing::Yes;
            Ok(())
        }
    }

    #[test]
    fn a_failed_capture_is_ended_for_the_allocators() {
        for stream in [Capturing::Yes, Capturing::Invalid, Capturing::No] {
            let mut model = Model { stream, allocators_capture: true, ended: false, restarts: true };
            let outcome = end(&mut model).map_err(|error| error.to_string());
            assert_eq!(outcome.is_ok(), stream == Capturing::Yes);
            if let Err(words) = outcome {
                // The first error, not that of the cleanup.
                assert!(words.ends_with(&format!("the stream's capture was {stream:?}")), "{words}");
            }
            assert_eq!((model.stream, model.allocators_capture), (Capturing::No, false), "{stream:?}");
        }
    }

    #[test]
    fn an_unrecoverable_capture_returns_its_first_failure() {
        let mut model =
            Model { stream: Capturing::Invalid, allocators_capture: true, ended: false, restarts: false };
        let words = end(&mut model).unwrap_err().to_string();
        assert!(words.ends_with("the stream's capture was Invalid"), "{words}");
        assert!(!model.ended);
    }
}
