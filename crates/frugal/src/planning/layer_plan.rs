//! Ways of keeping activations, as `training` and as [`accounting`] call them.

use accounting::activation_plan::Kept;
use training::activations::LayerPlan;

/// Returns what a layer of this plan keeps.
pub fn kept_by(plan: LayerPlan) -> Kept {
    match plan {
        LayerPlan::KeepAll => Kept::Everything,
        LayerPlan::RecomputeElementwise => Kept::Products,
        LayerPlan::RecomputeMlp => Kept::Attention,
        LayerPlan::RecomputeAttention => Kept::FeedForward,
        LayerPlan::RecomputeAll => Kept::Input,
        LayerPlan::Offload => Kept::InputOnHost,
    }
}

/// Returns the plan of a layer that keeps this.
pub fn layer_plan(kept: Kept) -> LayerPlan {
    match kept {
        Kept::Everything => LayerPlan::KeepAll,
        Kept::Products => LayerPlan::RecomputeElementwise,
        Kept::Attention => LayerPlan::RecomputeMlp,
        Kept::FeedForward => LayerPlan::RecomputeAttention,
        Kept::Input => LayerPlan::RecomputeAll,
        Kept::InputOnHost => LayerPlan::Offload,
    }
}
