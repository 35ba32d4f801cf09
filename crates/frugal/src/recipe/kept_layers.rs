//! Choice of the offloaded or divided layers that keep their activations.

use training::activations::{self, LayerPlan};

use crate::config::{ActivationPlan, Compute, Config, OffloadConfig, OffloadMethod, Recomputed};
use crate::error::Result;

impl Config {
    /// Returns which of `layers` offloaded layers keep their activations; `None` if that is open.
    ///
    /// # Errors
    /// `activations.every` of 0.
    pub(crate) fn kept_layers(&self, layers: usize) -> Result<Option<Vec<usize>>> {
        if let Some(keep) = self.offload.as_ref().and_then(|offload| offload.keep.clone()) {
            return Ok(Some(keep));
        }
        Ok(match self.activations.plan {
            ActivationPlan::Auto | ActivationPlan::Plan if !self.may_keep_offloaded() => Some(Vec::new()),
            ActivationPlan::Auto | ActivationPlan::Plan => None,
            ActivationPlan::Keep => Some((0..layers).collect()),
            ActivationPlan::Recompute => Some(Vec::new()),
            ActivationPlan::EveryK => {
                let plan = activations::every_kth(layers, self.activations.every, LayerPlan::RecomputeAll)?;
                Some((0..layers).filter(|&layer| plan[layer] == LayerPlan::KeepAll).collect())
            }
        })
    }

    /// Returns whether offloaded layers may keep their activations: in mixed precision these include casts of the weights, and
    /// methods other than `overlap` run every layer again.
    fn may_keep_offloaded(&self) -> bool {
        let overlaps = |offload: &OffloadConfig| offload.method == OffloadMethod::Overlap;
        self.precision.compute == Compute::Fp32 && self.offload.as_ref().is_none_or(overlaps)
    }

    /// Returns whether some of the offloaded layers keep their activations, as far as the configuration says.
    pub(super) fn keeps_offloaded(&self) -> bool {
        match self.offload.as_ref().and_then(|offload| offload.keep.as_ref()) {
            Some(keep) => !keep.is_empty(),
            None => matches!(self.activations.plan, ActivationPlan::Keep | ActivationPlan::EveryK),
        }
    }

    /// Returns whether offloaded layers would keep casts of their weights.
    pub(super) fn keeps_casts(&self) -> bool {
        self.keeps_offloaded() && self.precision.compute != Compute::Fp32
    }

    /// Returns whether offloaded layers keep their inputs in host memory.
    pub(crate) fn keeps_inputs_on_host(&self) -> bool {
        self.offload.is_some()
            && self.activations.recompute == Recomputed::Offload
            && matches!(self.activations.plan, ActivationPlan::Recompute | ActivationPlan::EveryK)
    }

    /// Returns whether each layer keeps all its activations or its input alone, by a plan that needs no measurement.
    pub(super) fn keeps_whole_layers(&self) -> bool {
        match self.activations.plan {
            ActivationPlan::Auto | ActivationPlan::Keep => true,
            ActivationPlan::Recompute | ActivationPlan::EveryK => {
                self.activations.recompute == Recomputed::Layer || self.keeps_inputs_on_host()
            }
            ActivationPlan::Plan => false,
        }
    }
}
