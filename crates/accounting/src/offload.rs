//! Offloading layers to host memory or files: bytes, seconds, and when loading is hidden by compute.
//!
//! A device holds the embedding, the last norm and the head (the *fixed* part), some *resident* layers, and a *ring* of N slots
//! for the other, *streamed* layers. A slot has the size of the largest streamed layer's flat buffer ([`flat_bytes`]). A
//! forward loads each layer once. A training step keeps each layer's input; the backward loads the layer again, recomputes
//! it and stores its gradients. A layer that keeps its activations ([`Layer::kept`]) is loaded as often, and not recomputed.
//!
//! # The schedule
//!
//! Three streams run concurrently, each in order: *compute*, *load* (to the device), *store* (from the device). A fourth, the
//! *host*, runs the optimizer if its state is on the host.
//!
//! ```text
//! visits   0 1 … L-1            of an inference step, over and over
//!          0 1 … L-1 L-1 … 1 0  of a training step
//! load     of the next visit whose layer is not on the device, when the load stream and a slot are free
//! slot     free when its layer's last visit is computed (and its updated weights are stored)
//! evict    of the free slots, the one whose layer is needed last (Belady, IBM Systems Journal 5:2, 1966)
//! compute  of a visit when the previous one is done and its layer is on the device
//! ```
//!
//! So the last N layers of a forward stay for the backward, and the first N of a backward for the next forward, unless the host has
//! updated them. A ring of one slot does not prefetch. A step starts when the previous one is done, except for loads, which may run
//! ahead. [`simulate`] follows this event by event; [`plan()`] finds the fastest setup that fits.
//!
//! # The condition
//!
//! [`least_tokens`] gives the tokens per step that hide the loads: for weights of 2 bytes `F / link` in forward, a third of it
//! in backward.
//!
//! # What is not modelled
//!
//! Contention of the streams for host memory, a link whose directions share their rate, launch latencies, and rounding by the
//! allocator.
//!
//! ```
//! use accounting::offload::{Method, OptimizerPlace, Setup, Start, simulate, sizes};
//! use accounting::{decoder_flops::Workload, offload::Rates, presets};
//!
//! let model = presets::find("qwen2.5-7b")?;
//! let rates = Rates { load: 25e9, store: 25e9, host_optimizer: 1.8e9, device_optimizer: 35e9 };
//! let choices = sizes::Choices { flops: 120e12, ..sizes::Choices::default() };
//! let costs = sizes::inference(&model, Workload { batch: 1, sequence: 8192 }, &choices)?;
//! let setup = Setup { method: Method::Overlap { ring: 3 }, resident: vec![], optimizer: OptimizerPlace::Host };
//! let step = simulate(&costs, &rates, &setup, Start::Warm)?;
//! // 8192 tokens are more than the condition's 4800: no load is waited for.
//! assert!(step.idle_seconds < 1e-9);
//! # Ok::<(), accounting::Error>(())
//! ```

mod condition;
mod footprint;
mod plan;
mod schedule;
mod setup;
mod simulate;
pub mod sizes;
mod step_costs;
mod timeline;

pub use condition::{Condition, Direction, GEN3, GEN4, GEN5, GPUS, Gpu, gpu, least_tokens};
pub(crate) use footprint::BETWEEN_STEPS;
pub use footprint::{Footprint, Moment};
pub use plan::{AvailableMemory, MOST_PLANNED_SLOTS, OffloadPlan, interleaved, plan};
pub use setup::{Method, OptimizerPlace, Setup, Start};
pub use simulate::{SimulatedStep, moments, simulate};
pub use step_costs::{ADAMW_STEP_BYTES, Fixed, Kept, Layer, Rates, StepCosts, WorkingMemory};
pub use timeline::{Operation, Span, StreamKind};

use crate::{Error, exact};

/// The alignment of every tensor in a flat buffer, in bytes.
pub const ALIGNMENT: u64 = 256;

/// Maximum number of slots in a simulation.
pub const MOST_SLOTS: usize = 8;

/// Returns the bytes of one region of a flat buffer: its tensors one after the other, each aligned to [`ALIGNMENT`], and the
/// end rounded up so that the next region is aligned. A layer's buffer is the sum of its regions, one for each dtype and
/// trainability.
///
/// # Errors
/// More than 64 bits of bytes.
///
/// ```
/// use accounting::offload::flat_bytes;
///
/// assert_eq!(flat_bytes(&[1000, 256, 1])?, 1024 + 256 + 256);
/// assert_eq!(flat_bytes(&[])?, 0);
/// # Ok::<(), accounting::Error>(())
/// ```
pub fn flat_bytes(tensors: &[u64]) -> Result<u64, Error> {
    const WHAT: &str = "bytes of a flat buffer";
    let aligned: Result<Vec<u64>, Error> =
        tensors.iter().map(|bytes| exact::product(WHAT, &[bytes.div_ceil(ALIGNMENT), ALIGNMENT])).collect();
    exact::sum(WHAT, aligned?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_beyond_64_bits_is_an_error() {
        assert_eq!(flat_bytes(&[0, 255, 257]).unwrap(), 256 + 512);
        assert!(flat_bytes(&[u64::MAX]).is_err(), "the end is rounded up");
        assert!(flat_bytes(&[u64::MAX / 2, u64::MAX / 2 + 1]).is_err());
    }
}
