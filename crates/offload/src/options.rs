//! How a model is offloaded.

use std::fmt;
use std::sync::Arc;

use tch::Device;
use training::layer_source::LayerSource;

use crate::error::{Result, refused};
use crate::storage::Tier;

/// How layers are moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Method {
    /// [`OffloadBlock`](crate::OffloadBlock): loads a layer, runs it, frees it. Inference only.
    OneLayer,
    /// [`OffloadBlockWithCheckpointing`](crate::OffloadBlockWithCheckpointing): the same with activation checkpointing.
    Checkpointing,
    /// [`OffloadBlockWithFunction`](crate::OffloadBlockWithFunction): the same with a custom autograd function.
    Function,
    /// [`OverlapOffloadBlock`](crate::OverlapOffloadBlock): prefetches the next layers while one runs.
    #[default]
    Overlap,
}

impl Method {
    /// All methods, from the simplest on.
    pub const ALL: [Self; 4] = [Self::OneLayer, Self::Checkpointing, Self::Function, Self::Overlap];

    /// Returns the name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneLayer => "one layer",
            Self::Checkpointing => "checkpointing",
            Self::Function => "function",
            Self::Overlap => "overlap",
        }
    }
}

/// A piece of work of a stream, for [`TestHook`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HookPoint {
    /// Queueing a load. Called on the computing thread.
    Queue,
    /// Loading a layer to the device.
    Load,
    /// Storing gradients on the host.
    Store,
    /// Running a layer.
    Compute,
    /// Waiting for, or recording, an event.
    Event,
    /// Updating a layer by the optimizer.
    Update,
}

/// Called on the stream's own thread before each [`HookPoint`], for tests that delay streams or make them fail. On CUDA work is
/// queued at the time of the call.
pub trait TestHook: Send + Sync {
    /// Called before the work at `point`. An error fails that work.
    ///
    /// # Errors
    /// The test's own.
    fn at(&self, point: HookPoint) -> runtime::Result<()>;
}

/// How to offload a model.
#[derive(Clone)]
pub struct OffloadConfig {
    /// The device on which layers run.
    pub device: Device,
    /// How layers are moved.
    pub method: Method,
    /// Where layers are stored.
    pub tier: Tier,
    /// Whether [`Offload::open`](crate::Offload::open) and [`Offload::assemble`](crate::Offload::assemble) leave layers in [`Tier::File`] to
    /// be trained: in the tier's own files, which are written. Otherwise these layers are frozen, and stay in the model's files.
    pub train_files: bool,
    /// Number of slots of the ring, for [`Method::Overlap`]: at least 1, which has no overlap; 3 for one running layer and two
    /// being loaded.
    pub ring: usize,
    /// Layers that stay on the device, by index.
    pub resident: Vec<usize>,
    /// Layers that keep their activations on the device until backward, by index. The others keep their inputs, and run again in
    /// backward. For [`Method::Overlap`].
    pub keep: Vec<usize>,
    /// Whether layers that keep their inputs alone keep them in host memory ([`HostOffload`](training::activations::HostOffload)): they are
    /// copied there while the layer runs, on the stream that stores gradients, and back while the layer after it runs backward. Then the
    /// device has the inputs of two layers at a time, however many there are.
    pub inputs_on_host: bool,
    /// Whether to page-lock host memory if the device is a GPU; transfers from other memory do not overlap.
    pub pinned: bool,
    /// The source that holds layers instead of the tier, as far as it takes them, such as `sharding::Shards`, with a part of each on every rank.
    /// Layers on the CPU, and [`Method::Overlap`].
    pub source: Option<Arc<dyn LayerSource>>,
    /// For tests.
    pub test_hook: Option<Arc<dyn TestHook>>,
}

impl Default for OffloadConfig {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            method: Method::default(),
            tier: Tier::default(),
            train_files: false,
            ring: 3,
            resident: Vec::new(),
            keep: Vec::new(),
            inputs_on_host: false,
            pinned: true,
            source: None,
            test_hook: None,
        }
    }
}

impl OffloadConfig {
    pub(crate) fn check(&self) -> Result<()> {
        if self.ring == 0 {
            return Err(refused("ring", "0 slots; expected at least 1, or 3 for full overlap"));
        }
        if !self.keep.is_empty() && self.method != Method::Overlap {
            let reason =
                format!("{:?} runs every layer again in backward; take Method::Overlap", self.method);
            return Err(refused("keep", reason));
        }
        if self.source.is_some() && self.method != Method::Overlap {
            let reason =
                format!("{:?} does not load layers from a source; take Method::Overlap", self.method);
            return Err(refused("method", reason));
        }
        Ok(())
    }

    pub(crate) fn at(&self, point: HookPoint) -> runtime::Result<()> {
        self.test_hook.as_ref().map_or(Ok(()), |test_hook| test_hook.at(point))
    }
}

impl fmt::Debug for OffloadConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OffloadConfig")
            .field("device", &self.device)
            .field("method", &self.method)
            .field("tier", &self.tier)
            .field("train_files", &self.train_files)
            .field("ring", &self.ring)
            .field("resident", &self.resident)
            .field("keep", &self.keep)
            .field("inputs_on_host", &self.inputs_on_host)
            .field("pinned", &self.pinned)
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}
