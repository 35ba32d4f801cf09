//! How a model is offloaded.

use std::fmt;
use std::sync::Arc;

use tch::Device;

use crate::error::{Error, Result};
use crate::home::Tier;

/// A rung of the ladder: how layers come and go.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Method {
    /// [`OffloadBlock`](crate::OffloadBlock): bring a layer, run it, let it go. Inference only.
    OneLayer,
    /// [`OffloadBlockWithCheckpointing`](crate::OffloadBlockWithCheckpointing): the same as a recomputed segment.
    Checkpointing,
    /// [`OffloadBlockWithFunction`](crate::OffloadBlockWithFunction): the same as a function with a backward of its own.
    Function,
    /// [`OverlapOffloadBlock`](crate::OverlapOffloadBlock): the next layers come while one runs.
    #[default]
    Overlap,
}

impl Method {
    /// All, from the first rung up.
    pub const ALL: [Self; 4] = [Self::OneLayer, Self::Checkpointing, Self::Function, Self::Overlap];

    /// A name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneLayer => "one layer",
            Self::Checkpointing => "checkpointing",
            Self::Function => "function",
            Self::Overlap => "overlap",
        }
    }
}

/// Something that a lane is about to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Point {
    /// Queue a layer's way to the device. Called on the thread that computes.
    Queue,
    /// Bring a layer to the device.
    Load,
    /// Take gradients to the host.
    Store,
    /// Run a layer.
    Compute,
    /// Wait for, or record, an event.
    Event,
    /// Step the optimizer of a layer.
    Update,
}

/// Called on the lane's own thread before each [`Point`]: for tests that delay lanes, or break them. On CUDA the lanes' work is queued
/// at the time of the call.
pub trait Probe: Send + Sync {
    /// A lane is at `point`. An error is the lane's.
    ///
    /// # Errors
    /// Whatever the test wants to fail.
    fn at(&self, point: Point) -> runtime::Result<()>;
}

/// How a model is offloaded.
#[derive(Clone)]
pub struct Options {
    /// Where layers run.
    pub device: Device,
    /// How they come and go.
    pub method: Method,
    /// Where they live.
    pub tier: Tier,
    /// Slots of the ring, for [`Method::Overlap`]: from 1, without any overlap, up. 3 is one that runs, and two on their way.
    pub ring: usize,
    /// Layers that stay on the device, by their number. In training they are run again in backward, as all layers are.
    pub resident: Vec<usize>,
    /// Whether the host's memory is page-locked where the device is a GPU; transfers from other memory do not overlap.
    pub pinned: bool,
    /// For tests.
    pub probe: Option<Arc<dyn Probe>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            method: Method::default(),
            tier: Tier::default(),
            ring: 3,
            resident: Vec::new(),
            pinned: true,
            probe: None,
        }
    }
}

impl Options {
    pub(crate) fn check(&self) -> Result<()> {
        if self.ring == 0 {
            return Err(Error::config("ring", "0 slots; expected 1 or more, 3 for full overlap"));
        }
        Ok(())
    }

    pub(crate) fn at(&self, point: Point) -> runtime::Result<()> {
        self.probe.as_ref().map_or(Ok(()), |probe| probe.at(point))
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("device", &self.device)
            .field("method", &self.method)
            .field("tier", &self.tier)
            .field("ring", &self.ring)
            .field("resident", &self.resident)
            .field("pinned", &self.pinned)
            .finish_non_exhaustive()
    }
}
