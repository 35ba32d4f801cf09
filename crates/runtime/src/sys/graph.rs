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
    fn rt_graph_begin(graph: *mut Opaque) -> Status;
    fn rt_graph_end(graph: *mut Opaque) -> Status;
    fn rt_graph_replay(graph: *mut Opaque) -> Status;
}

/// A CUDA graph of libtorch. Stays on the thread that made it: libtorch's class takes no lock.
#[derive(Debug)]
pub(crate) struct CudaGraph {
    graph: *mut Opaque,
    _thread: PhantomData<*mut ()>,
}

impl CudaGraph {
    /// An empty graph. CUDA is there, as the caller has checked. An error where this libtorch has no such class.
    pub(crate) fn new() -> Result<Self> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the out-parameter is valid during the call.
        unsafe { check(rt_graph_new(&mut graph)) }?;
        Ok(Self { graph, _thread: PhantomData })
    }

    /// Captures what the thread's current stream is given, until [`CudaGraph::end`].
    pub(crate) fn begin(&mut self) -> Result<()> {
        // SAFETY: the graph is ours.
        unsafe { check(rt_graph_begin(self.graph)) }
    }

    /// Ends the capture.
    pub(crate) fn end(&mut self) -> Result<()> {
        // SAFETY: the graph is ours.
        unsafe { check(rt_graph_end(self.graph)) }
    }

    /// Launches what was captured on the current stream.
    pub(crate) fn replay(&mut self) -> Result<()> {
        // SAFETY: the graph is ours; libtorch refuses one whose capture has not ended.
        unsafe { check(rt_graph_replay(self.graph)) }
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        // SAFETY: the graph is ours and freed once.
        unsafe { rt_graph_free(self.graph) };
    }
}
