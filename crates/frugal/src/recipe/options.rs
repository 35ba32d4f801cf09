//! The configuration's values as the options of the techniques' crates.

use offload::{ExpertConfig, Method, Tier};
use sharding::{FrozenWeights, Reduction};
use tch::Device;
use training::activations::LayerPlan;

use crate::config::{
    ExpertsConfig, FrozenPlace, OffloadConfig, OffloadMethod, OffloadTier, Recomputed, ReductionOrder,
};

impl Recomputed {
    /// Returns the plan of a layer.
    pub fn layer_plan(self) -> LayerPlan {
        match self {
            Self::Layer => LayerPlan::RecomputeAll,
            Self::Elementwise => LayerPlan::RecomputeElementwise,
            Self::Mlp => LayerPlan::RecomputeMlp,
            Self::Attention => LayerPlan::RecomputeAttention,
            Self::Offload => LayerPlan::Offload,
        }
    }
}

impl From<FrozenPlace> for FrozenWeights {
    fn from(place: FrozenPlace) -> Self {
        match place {
            FrozenPlace::Whole => Self::Whole,
            FrozenPlace::Sharded => Self::Sharded,
        }
    }
}

impl From<ReductionOrder> for Reduction {
    fn from(order: ReductionOrder) -> Self {
        match order {
            ReductionOrder::Ordered => Self::Ordered,
            ReductionOrder::Native => Self::Native,
        }
    }
}

impl ExpertsConfig {
    /// Returns the options of `offload`.
    pub fn options(&self) -> ExpertConfig {
        ExpertConfig { cache: self.cache.0, folder: self.folder.clone().unwrap_or_else(std::env::temp_dir) }
    }
}

impl OffloadConfig {
    /// Returns the options of `offload`, for layers that run on `device` and keep their inputs.
    pub fn options(&self, device: Device) -> offload::OffloadConfig {
        offload::OffloadConfig {
            device,
            method: match self.method {
                OffloadMethod::OneLayer => Method::OneLayer,
                OffloadMethod::Checkpointing => Method::Checkpointing,
                OffloadMethod::Function => Method::Function,
                OffloadMethod::Overlap => Method::Overlap,
            },
            tier: match self.tier {
                OffloadTier::Host => Tier::Host,
                OffloadTier::File => Tier::File(self.folder.clone().unwrap_or_else(std::env::temp_dir)),
            },
            ring: self.ring,
            resident: self.resident.clone(),
            pinned: self.pinned,
            ..offload::OffloadConfig::default()
        }
    }
}
