//! Candidate plans of a training step: which layers keep their activations, which weights are on the device, and how many rows go
//! through the model at a time. Each has a peak and a time; [`Job::search`] finds the fastest within a budget.
//!
//! With b rows in a batch, A batches in a step, and r ≤ b rows in a pass, a step is A·⌈b/r⌉ passes of forward and backward and one
//! update. All candidates compute the same gradients: those of one pass over the batch bit for bit, those of several up to the order of a
//! sum.
//!
//! | placement | the device holds | a pass costs more by |
//! |---|---|---|
//! | [`Placement::Resident`] | all weights, and the activations that each layer keeps | the recomputation of the others |
//! | [`Placement::Offloaded`] | a ring of layers, the resident layers, every layer's input or activations | a forward of the layers that keep their inputs, and loads that compute does not hide |
//! | the same, with inputs in host memory | the inputs of the layers that run or return | copies of inputs that compute does not hide |
//! | fewer rows | the activations of these rows | each pass loads offloaded layers again, and on a CPU packs the weights of each product again |
//!
//! Bytes are those of [`simulate`], for the largest batch of the data. Three things are added to it. With several passes in a step,
//! the gradients of all parameters exist during each of them ([`Job::is_accumulated`]). A step on a CPU makes copies of 16-bit
//! weights ([`sizes::update_bytes`]). And on a CPU memory of the host is that of the device. Pages of files are not counted: the system
//! drops them when memory is short.
//!
//! Over ranks ([`Ranks`]) a batch is one rank's, a round of the step; the ranks divide the batches of a step among them, and the stages of ZeRO are
//! candidates too. Their gradients have the same bits.
//!
//! Seconds are FLOPs and bytes by rates, for a batch of mean size. On a CPU transfers and updates take turns with products, which use all
//! its cores. A recomputation that repeats no product is bound by memory: it reads
//! and writes the tensors of norms, rotary embedding, SiLU and sums once.
//!
//! ```
//! use accounting::candidates::{Allowed, Batch, Job};
//! use accounting::decoder_flops::Workload;
//! use accounting::lora::LowRank;
//! use accounting::offload::{AvailableMemory, Rates, sizes::Choices};
//! use accounting::presets;
//!
//! let rates = Rates { load: 25e9, store: 25e9, host_optimizer: 2e9, device_optimizer: 35e9 };
//! let batch = Batch::new(Workload { batch: 4, sequence: 1024 }, None);
//! let adapters = Some(LowRank::default());
//! let job = Job::new(presets::find("qwen2.5-0.5b")?, adapters, Choices::default(), batch, rates);
//! let result = job.search(&Allowed::default(), AvailableMemory { device: 4 << 30, host: None })?;
//! let chosen = result.chosen().expect("a candidate that fits");
//! assert!(chosen.peak.total <= 4 << 30);
//! # Ok::<(), accounting::Error>(())
//! ```

mod activations;
mod captured;
mod evaluate;
mod name;
mod ranks;
mod search;
mod teacher;

use crate::Decoder;
use crate::activation_plan::LayerPlan;
use crate::decoder_flops::Workload;
use crate::lora::LowRank;
use crate::offload::sizes::Choices;
use crate::offload::{Footprint, OptimizerPlace, Rates};

pub use captured::CapturedMemory;
pub use ranks::{Ranks, Traffic};
pub use search::{Allowed, Layers, OffloadedLayers, SearchResult};
pub use teacher::Teacher;

#[cfg(doc)]
use crate::offload::{simulate, sizes};

/// A batch of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Rows, and positions of each, padding included; of rows without padding their mean, rounded up.
    pub work: Workload,
    /// Positions with a label; `None` for all.
    pub labelled: Option<u64>,
    /// Positions of the longest row, of rows without padding: a part of a batch may have the longest ones.
    pub longest: Option<u64>,
}

impl Batch {
    /// A batch of rows of one length.
    pub fn new(work: Workload, labelled: Option<u64>) -> Self {
        Self { work, labelled, longest: None }
    }
}

/// The step of a training, and the rates of its machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// The model.
    pub model: Decoder,
    /// The adapters of a frozen model; `None` if all weights are trained.
    pub lora: Option<LowRank>,
    /// Number formats, rate of products, loss.
    pub choices: Choices,
    /// Batches of the data; the peak of a step is that of one of them.
    pub largest: Vec<Batch>,
    /// A batch of mean size, for times.
    pub mean: Batch,
    /// The batch of an evaluation between steps, in the fewest rows at a time; `None` if none is made.
    pub evaluation: Option<Batch>,
    /// Gradient accumulation steps: batches of a step.
    pub accumulation: u64,
    /// Whether the gradient norm is clipped, for which all gradients must exist before the first update.
    pub clips: bool,
    /// Whether each weight is updated during backward, and its gradient is freed. Without accumulation, clipping, offloaded layers and ranks.
    pub in_backward: bool,
    /// Rates of layers in host memory, and of the optimizer.
    pub rates: Rates,
    /// Bytes per second of layers in files.
    pub file_load: f64,
    /// Parameters per second of an optimizer whose state is in files.
    pub file_optimizer: f64,
    /// Whether the device is the host's processor.
    pub on_cpu: bool,
    /// The ranks that run a step together, this one among them; `None` for one process.
    pub ranks: Option<Ranks>,
    /// Forward passes over each batch beside that which is learned from, such as a reference model's of the same weights without the
    /// adapters.
    pub further_passes: u32,
    /// A second model, whose distributions are learned.
    pub teacher: Option<Teacher>,
}

impl Job {
    /// Creates a job on a GPU whose steps are one batch each, all of one size, with gradients that are clipped and files as fast as host
    /// memory.
    pub fn new(model: Decoder, lora: Option<LowRank>, choices: Choices, batch: Batch, rates: Rates) -> Self {
        Self {
            model,
            lora,
            choices,
            largest: vec![batch],
            mean: batch,
            evaluation: None,
            accumulation: 1,
            clips: true,
            in_backward: false,
            rates,
            file_load: rates.load,
            file_optimizer: rates.host_optimizer,
            on_cpu: false,
            ranks: None,
            further_passes: 0,
            teacher: None,
        }
    }
}

/// The storage of offloaded layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// In host memory.
    Host,
    /// In files; the optimizer's state of trained layers and sums of their gradients, too.
    File,
}

/// The places of the layers of a pass, and the activations that they keep for backward.
#[derive(Clone, Debug, PartialEq)]
pub enum Placement {
    /// All weights are on the device. The plan of each layer, in the order of forward.
    Resident(Vec<LayerPlan>),
    /// Layers are loaded when they run.
    Offloaded {
        /// Their storage between passes.
        tier: Tier,
        /// Layers on the device at a time, besides the resident ones.
        ring: usize,
        /// Layers that stay on the device.
        resident: Vec<usize>,
        /// Layers that keep their activations. The others keep their inputs and run again in backward.
        keep: Vec<usize>,
        /// Whether these inputs are in host memory between forward and backward.
        inputs_on_host: bool,
        /// The place of the optimizer's state.
        optimizer: OptimizerPlace,
    },
}

/// A plan of a step, with its peak and its time.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The places of the layers, and the activations that they keep.
    pub placement: Placement,
    /// Rows of a pass; `None` for those of a batch.
    pub rows: Option<u64>,
    /// The ranks that run it, and what they divide; `None` for one process.
    pub ranks: Option<Ranks>,
    /// Bytes on the device at the peak; on a CPU with those of the host.
    pub peak: Footprint,
    /// The number of the batch in [`Job::largest`] with the peak.
    pub batch: usize,
    /// Bytes on the device at the peak of [`Job::evaluation`]; 0 without one.
    pub evaluation_bytes: u64,
    /// Bytes in host memory besides; 0 on a CPU.
    pub host_bytes: u64,
    /// Seconds of a step of mean batches.
    pub seconds: f64,
}

impl Candidate {
    /// Returns the bytes that the device must have: those of the step, or of an evaluation where it takes more.
    pub fn device_bytes(&self) -> u64 {
        self.peak.total.max(self.evaluation_bytes)
    }

    /// Returns whether gradients have the bits of one pass over the batch whose layers keep everything.
    pub fn keeps_bits(&self) -> bool {
        self.rows.is_none()
    }
}
