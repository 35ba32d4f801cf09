//! Inefficiencies that can be switched on: those that the training assignment hides in its script, and other common ones, so that
//! a profile can be compared with and without each.
//!
//! None is a delay: the setup that it belongs to (model, loss head, optimizer, loader) is built the slow
//! way. All but two train the same model on the same batches to the same losses; [`Inefficiency::PadToMax`] has other batches
//! and [`Inefficiency::OddWidth`] another model.

mod host_reads;
mod indexed_loss;
mod tokenize_per_item;
mod unused_projection;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tch::Device;

pub use host_reads::HostReadsHead;
pub use indexed_loss::IndexedLossHead;
pub use tokenize_per_item::TokenizePerItem;
pub use unused_projection::UnusedProjection;

/// An inefficiency that can be switched on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Inefficiency {
    /// Every row is padded to the longest that there may be.
    PadToMax,
    /// Samples are tokenized again each time they are read.
    TokenizePerItem,
    /// Batches are made in the training thread, when they are asked for.
    NoWorkers,
    /// Batches lie in pageable memory, so that the copy to a CUDA device blocks; nothing on a CPU.
    Unpinned,
    /// Widths one below a multiple of 16: products run beside the vector units' width.
    OddWidth,
    /// A projection whose result is unused.
    UnusedProjection,
    /// Attention weights `[batch, heads, t, t]` are made and kept.
    ExplicitAttention,
    /// A `[t, t]` mask is built, and converted to the scores' dtype, in each forward.
    MaskPerForward,
    /// The loss picks the labelled rows of the logits by a boolean index, which copies them.
    IndexedLoss,
    /// Right predictions are counted in each step, a pass over the logits.
    AccuracyEachStep,
    /// Loss and accuracy are read by the host in each step, which waits for the device.
    HostReads,
    /// Gradients are filled with zeros after a step, and added to in the next.
    ZeroedGradients,
    /// The optimizer works parameter by parameter, operator by operator.
    UnfusedOptimizer,
}

impl Inefficiency {
    /// All of them, in the order in which data flows through a step.
    pub const ALL: [Self; 13] = [
        Self::PadToMax,
        Self::TokenizePerItem,
        Self::NoWorkers,
        Self::Unpinned,
        Self::OddWidth,
        Self::UnusedProjection,
        Self::ExplicitAttention,
        Self::MaskPerForward,
        Self::IndexedLoss,
        Self::AccuracyEachStep,
        Self::HostReads,
        Self::ZeroedGradients,
        Self::UnfusedOptimizer,
    ];

    /// Whether it does anything on a device: pinned memory is a matter of CUDA alone.
    pub fn concerns(self, device: Device) -> bool {
        self != Self::Unpinned || device.is_cuda()
    }

    /// Its name on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::PadToMax => "pad-to-max",
            Self::TokenizePerItem => "tokenize-per-item",
            Self::NoWorkers => "no-workers",
            Self::Unpinned => "unpinned",
            Self::OddWidth => "odd-width",
            Self::UnusedProjection => "unused-projection",
            Self::ExplicitAttention => "explicit-attention",
            Self::MaskPerForward => "mask-per-forward",
            Self::IndexedLoss => "indexed-loss",
            Self::AccuracyEachStep => "accuracy-each-step",
            Self::HostReads => "host-reads",
            Self::ZeroedGradients => "zeroed-gradients",
            Self::UnfusedOptimizer => "unfused-optimizer",
        }
    }
}

impl std::fmt::Display for Inefficiency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
