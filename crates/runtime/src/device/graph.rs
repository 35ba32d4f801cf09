//! A step that is captured once and launched again as one: a CUDA graph.
//!
//! A training step launches some thousand kernels. Where each takes a few microseconds, the processor that launches them is
//! what takes the time. A CUDA graph is the list of all launches, with their addresses, that the GPU goes through by itself;
//! [`Step::capture`] makes it of a whole step: forward, backward, optimizer.
//!
//! What a step must be:
//! - **Static**: the same kernels, shapes and addresses each time. New data is copied into the tensors that the step was
//!   captured with ([`super::copy_async`]), and results are read from those that it wrote.
//! - **Without waiting**: nothing reads a device's value (`double_value`, a loss that is printed, a scaler that looks for
//!   infinities on the host), copies to pageable memory, or waits. CUDA makes such a call fail, and the capture with it.
//! - **Warm**: the step runs `warmup` times on the capture's own stream first, so that libraries have their workspaces,
//!   optimizers their state, and gradients exist. These are real steps: they change weights.
//! - **Random numbers** may come from the device's default generator alone, which libtorch registers with the graph: each replay
//!   moves it on. Another generator would give the same numbers each time.
//! - **Its memory is the graph's**: what the step allocates while it is captured lies in a pool that each replay overwrites.
//!   What the closure owns lives as long as the step. A tensor that it borrows through a shared handle must not get other memory
//!   (`set_data`, `set_grad(None)` outside): a replay would use the old one, which may be another tensor's by then.
//! - **On its own stream**: other threads may use the device on other streams meanwhile, as a loader does; what they do is not part
//!   of the step. A wait for the whole device may fail meanwhile, on any thread.
//!
//! There is no such thing on a CPU, where a launch is a call: [`Step::capture`] says so.
//!
//! How it is built: libtorch 2.11 has no graph in its device-generic interface (2.13 has `at::accelerator::Graph`), and the
//! header of `at::cuda::CUDAGraph` needs CUDA's. Its methods are found in `libtorch_cuda` by name and called by the platform's C++ ABI; `cpp/graph.cpp` has the
//! checks (version, names, size). On an H200 a training step of 32 layers of width 256 takes 0.20 of its time with launches.

use tch::Device;

use super::choice::checked;
use super::{Stream, synchronize};
use crate::error::{Error, Result};
use crate::sys::graph::CudaGraph;

/// A captured step. See the [module](self).
pub struct Step {
    graph: CudaGraph,
    device: Device,
    /// Owns the tensors whose addresses are in the graph. Dropped after the graph.
    _body: Box<dyn FnMut() -> Result<()>>,
}

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Step").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Step {
    /// Runs `body` `warmup` times, then captures one run of it, which computes nothing yet. At least one run warms up; libtorch
    /// advises three, or eleven with distributed data.
    ///
    /// # Errors
    /// [`Error::Unavailable`] on a CPU, where CUDA is not there, and where libtorch is not the one that this was built for;
    /// no warm-up; what `body` returns; a call in `body` that no graph can hold. After a failure nothing is captured, the
    /// warm-up has taken place, and the device works as before.
    pub fn capture(
        device: Device,
        warmup: usize,
        body: impl FnMut() -> Result<()> + 'static,
    ) -> Result<Self> {
        if checked(device)?.is_none() {
            return Err(Error::Unavailable {
                what: "a captured step".into(),
                reason: "a graph of launches exists on CUDA devices alone; call the step itself, whose launches are calls on \
                         a CPU"
                    .into(),
            });
        }
        if warmup == 0 {
            let reason =
                "0 runs to warm up; expected one at least, since the first run allocates what must be there";
            return Err(Error::invalid("capture", reason));
        }
        let mut body = Box::new(body);
        let stream = Stream::new(device)?;
        // What the step uses may still be written on another stream.
        synchronize(device)?;
        let _current = stream.enter()?;
        // After the guard, so that it is dropped before: a capture is ended on its own stream, after a panic too.
        let mut graph = CudaGraph::new().map_err(|error| Error::Unavailable {
            what: "a captured step".into(),
            reason: format!(
                "{error}; install the libtorch that this was built for (`cargo xtask setup --cuda`)"
            ),
        })?;
        for _ in 0..warmup {
            body()?;
        }
        synchronize(device)?;
        graph.begin()?;
        let captured = body();
        let ended = graph.end();
        captured?;
        ended?;
        Ok(Self { graph, device, _body: body })
    }

    /// Launches the step again on the current stream of this thread. Returns before it is done.
    ///
    /// # Errors
    /// A failure of the launch; on CUDA, an asynchronous error of an earlier kernel.
    pub fn replay(&mut self) -> Result<()> {
        self.graph.replay()
    }

    /// Waits until all replays are done.
    ///
    /// # Errors
    /// An asynchronous error of a kernel.
    pub fn synchronize(&self) -> Result<()> {
        synchronize(self.device)
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        // A replay may still use what is freed here. A failure has no one to tell.
        let _ = self.synchronize();
    }
}
