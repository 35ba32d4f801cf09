//! The activation plan of least recomputation under a budget, on paper.

use super::{Batch, Candidate, Job, Placement};
use crate::activation_plan::{LayerChoice, LayerCost, LayerPlan, least_recomputation};
use crate::model::Part;
use crate::offload::StepCosts;
use crate::offload::sizes;
use crate::{Error, decoder_flops};

/// Attempts to find a plan whose whole step fits, after that for the layers alone.
const ATTEMPTS: usize = 6;

impl Job {
    /// The plans that a layer may have. Elementwise recomputation depends on the kernel of attention, which is known on a CPU. There a copy in
    /// host memory saves nothing. A layer that ranks divide keeps everything, or its input.
    pub(super) fn kept_options(&self) -> &'static [LayerPlan] {
        if self.divides_layers() {
            return &[LayerPlan::KeepAll, LayerPlan::RecomputeAll];
        }
        match self.on_cpu {
            true => &[
                LayerPlan::KeepAll,
                LayerPlan::RecomputeElementwise,
                LayerPlan::RecomputeMlp,
                LayerPlan::RecomputeAttention,
                LayerPlan::RecomputeAll,
            ],
            false => &[
                LayerPlan::KeepAll,
                LayerPlan::RecomputeMlp,
                LayerPlan::RecomputeAttention,
                LayerPlan::RecomputeAll,
                LayerPlan::Offload,
            ],
        }
    }

    /// Parts of a layer that may be kept on the device, without a copy in host memory.
    pub(super) fn options_on_device(&self) -> Vec<LayerPlan> {
        self.kept_options().iter().copied().filter(|option| *option != LayerPlan::Offload).collect()
    }

    /// The costs of a layer that keeps each of `options`, in the middle of the model.
    pub(super) fn layer_choices(
        &self,
        batch: Batch,
        options: &[LayerPlan],
    ) -> Result<Vec<LayerChoice<LayerPlan>>, Error> {
        let costs = self.costs(batch)?;
        // The first layer differs, and those of a model with several kinds of layers: the one that keeps most stands for all.
        let first = 1.min(costs.layers.len().saturating_sub(1));
        options
            .iter()
            .map(|&option| {
                let plan = vec![option; costs.layers.len()];
                let planned = self.divided(self.with_plan(costs.clone(), batch, &plan)?)?;
                let kept_bytes = |at: &usize| planned.layers[*at].kept.map(|kept| kept.bytes);
                let at = (first..planned.layers.len()).rev().max_by_key(kept_bytes).unwrap_or(first);
                let layer = planned.layers[at];
                let kept = layer.kept.unwrap_or_default();
                let cost = LayerCost {
                    held_bytes: kept.bytes,
                    host_bytes: if option == LayerPlan::Offload { costs.working.input_bytes } else { 0 },
                    recompute_seconds: (layer.backward_seconds - costs.layers[at].backward_seconds).max(0.0),
                    transient_bytes: kept.backward_bytes,
                };
                Ok(LayerChoice { of: option, cost })
            })
            .collect()
    }

    /// Returns the costs of resident layers under `plan`, with the seconds of their recomputation.
    pub(super) fn with_plan(
        &self,
        costs: StepCosts,
        batch: Batch,
        plan: &[LayerPlan],
    ) -> Result<StepCosts, Error> {
        let lora = self.lora.as_ref();
        let mut costs =
            sizes::with_activation_plan(costs, &self.model, lora, batch.work, &self.choices, plan)?;
        let seconds = self.recomputation_seconds(&costs, batch)?;
        for (layer, &kept) in costs.layers.iter_mut().zip(plan) {
            layer.backward_seconds += seconds(kept);
        }
        Ok(costs)
    }

    /// Seconds that a layer's backward takes longer than one that keeps everything.
    fn recomputation_seconds(
        &self,
        costs: &StepCosts,
        batch: Batch,
    ) -> Result<impl Fn(LayerPlan) -> f64 + use<>, Error> {
        let forward = costs.layers.first().map_or(0.0, |layer| layer.forward_seconds);
        let flops = decoder_flops::step(&self.model, batch.work, &decoder_flops::Recomputation::default())?;
        let of = |part: Part| {
            let rows = flops.rows.iter().filter(|row| row.part == part);
            rows.map(|row| row.forward.causal as f64).sum::<f64>()
        };
        let (attention, feed_forward) = (of(Part::Attention), of(Part::FeedForward));
        let share = feed_forward / (attention + feed_forward).max(1.0);
        let model = &self.model;
        // Two norms and two sums read and write the residual stream, SiLU reads two tensors and writes one.
        let numbers =
            8 * model.hidden + 2 * (model.query_width()? + model.kv_width()?) + 3 * model.feed_forward;
        let width = (self.choices.recipe.compute.storage_bits() / 8) as f64;
        let elementwise = batch.work.tokens()? as f64 * numbers as f64 * width / self.choices.bandwidth;
        Ok(move |kept| match kept {
            LayerPlan::KeepAll => 0.0,
            LayerPlan::RecomputeElementwise => elementwise.min(forward),
            LayerPlan::RecomputeMlp => forward * share,
            LayerPlan::RecomputeAttention => forward * (1.0 - share),
            LayerPlan::RecomputeAll | LayerPlan::Offload => forward,
        })
    }

    /// The plan of least recomputation among `options` whose step fits `budget`; `None` if none does.
    pub(super) fn least_recomputed(
        &self,
        options: &[LayerPlan],
        rows: Option<u64>,
        budget: u64,
    ) -> Result<Option<Candidate>, Error> {
        let layers = self.model.layers as usize;
        let batch = self.pass(self.widest(), rows);
        let choices = self.layer_choices(batch, options)?;
        // The bytes of the layers: at first the budget, then less by the excess of the step.
        let mut available = budget;
        for _ in 0..ATTEMPTS {
            let plan = match least_recomputation(layers, &choices, available) {
                Ok(plan) => plan,
                Err(Error::NoPlanFits { .. }) => return Ok(None),
                Err(error) => return Err(error),
            };
            let candidate = self.evaluate(Placement::Resident(plan.layers), rows)?;
            let Some(excess) = candidate.peak.total.checked_sub(budget).filter(|excess| *excess > 0) else {
                return Ok(Some(candidate));
            };
            // Where the peak is not in the layers, their plan must shrink more than by the excess.
            available = available.min(plan.peak_bytes).saturating_sub(excess);
        }
        Ok(None)
    }

    /// The plan among `options` that takes the fewest bytes.
    pub(super) fn least_held(&self, options: &[LayerPlan], rows: Option<u64>) -> Result<Candidate, Error> {
        let layers = self.model.layers as usize;
        let choices = self.layer_choices(self.pass(self.widest(), rows), options)?;
        let least = match least_recomputation(layers, &choices, 0) {
            Err(Error::NoPlanFits { needed, .. }) => least_recomputation(layers, &choices, needed)?,
            other => other?,
        };
        let planned = self.evaluate(Placement::Resident(least.layers), rows)?;
        // The head may need more than the layers; then the kept bytes count, not those that a backward adds.
        let held = |choice: &&LayerChoice<LayerPlan>| (choice.cost.held_bytes, choice.cost.transient_bytes);
        let Some(smallest) = choices.iter().min_by_key(held) else { return Ok(planned) };
        let uniform = self.evaluate(Placement::Resident(vec![smallest.of; layers]), rows)?;
        Ok(if uniform.peak.total < planned.peak.total { uniform } else { planned })
    }
}
