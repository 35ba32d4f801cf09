//! CUDA graphs: a step that is captured once and launched again as one.
//!
//! A training step launches some thousand kernels. If each takes a few microseconds, launching them on the CPU is the bottleneck. A
//! CUDA graph is the list of all launches, with their addresses, which the GPU executes by itself; [`Capture::run`] captures a whole step:
//! forward, backward, optimizer.
//!
//! Requirements for a step:
//! - **Static**: the same kernels, shapes and addresses each time. Copy new data into the tensors that the step was captured with
//!   ([`super::copy_async`]), and read results from those that it wrote.
//! - **No synchronisation**: nothing reads a device's value (`double_value`, a printed loss, a scaler that looks for infinities on
//!   the host), copies to pageable memory, or waits. Such a call fails during a capture, and so does the capture.
//! - **Warm**: the step runs once on the capture's own stream first, so that libraries have their workspaces,
//!   optimizers their state, and gradients exist.
//! - **Random numbers** may come from the device's default generator alone, which libtorch registers with the graph: each replay
//!   advances it. Another generator would give the same numbers each time.
//! - **Memory belongs to the graph**: what the step allocates while it is captured is in a pool that each replay overwrites. It keeps
//!   the peak of the step until its last graph is dropped, and no other tensor gets memory from it. What
//!   the closure owns lives as long as the step. A tensor that it shares with other code must not get other memory (`set_data`,
//!   `set_grad(None)` outside): a replay would use the old memory, which may belong to another tensor by then.
//! - **Its own stream**: other threads, such as a loader's, may use the device on other streams during the capture; their work is
//!   not part of the step. A wait for the whole device may fail during the capture, on any thread.
//!
//! A [`Capture`] is for a loop whose steps compute from the first on: its first run warms up, its second is captured, and the
//! [`Graph`] replays the following ones. [`CapturedStep`] runs both of one body, and owns it.
//!
//! On a CPU, where a launch is a call, [`Capture::new`] returns an error. [`Capture::recorder`] is a graph's stand-in on a CPU: it records every operator that reaches the
//! backends and calls them again with the recorded scalars and memory, so that whatever a graph would not repeat shows in the result. Two
//! runs are compared: a scalar, an address or a shape that differs is an error that names the operator and the argument, as are
//! values that the host reads and kernels outside the dispatcher. [`operators_only`] is the switch by which kernels leave their own
//! code for libtorch's operators.
//!
//! Implementation: libtorch 2.11 has no graph in its device-generic interface (2.13 has `at::accelerator::Graph`), and the header
//! of `at::cuda::CUDAGraph` needs those of CUDA. Its methods are looked up in `libtorch_cuda` by name and called by the platform's
//! C++ ABI; `cpp/graph.cpp` has the checks (version, names, size). On an H200, replaying a training step of 32 layers of width 256
//! takes 0.20 of the time of launching it.

mod capture;

use tch::Device;

use crate::error::Result;
pub use capture::{Capture, Graph, OperatorsOnly, Pool, operators_only};
pub(crate) use capture::{Progress, ProgressGuard, progress};

/// A captured step. See the [module](self).
pub struct CapturedStep {
    graph: Graph,
    device: Device,
    /// Owns the tensors whose addresses are in the graph. Dropped after the graph.
    _body: Box<dyn FnMut() -> Result<()>>,
}

impl std::fmt::Debug for CapturedStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CapturedStep").field("device", &self.device).finish_non_exhaustive()
    }
}

impl CapturedStep {
    /// Runs `body` twice: once eagerly, then from the graph that it captures ([`Capture::run`]). Both runs compute.
    ///
    /// # Errors
    /// Those of [`Capture::new`] and [`Capture::run`]. After a failure nothing is captured, and the device works as before.
    pub fn capture(device: Device, body: impl FnMut() -> Result<()> + 'static) -> Result<Self> {
        let mut capture = Capture::new(device)?;
        let mut body = Box::new(body);
        loop {
            if let ((), Some(graph)) = capture.run(None, &mut *body)? {
                return Ok(Self { graph, device, _body: body });
            }
        }
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
        super::synchronize(self.device)
    }
}
