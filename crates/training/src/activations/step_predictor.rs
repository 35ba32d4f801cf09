//! Predicts the cost of a whole model's step under a plan, from measurements of one layer.
//!
//! H and T are a layer's kept and transient bytes, E is what is kept outside the layers, and D what the head needs, all beyond
//! what is alive between steps:
//!
//! ```text
//! peak = max( E + Σ H + D,  max over layers i of  E' + H₀ + … + Hᵢ + Tᵢ )      time = outside + Σ (layer + recomputation)
//! ```
//!
//! E' is what remains of E when the layers' backward starts: the engine holds the gradient of a weight that head and embedding
//! share until the embedding's part arrives. The embedding's own backward is left out: the head, whose logits are as wide,
//! needs more. Everything is measured on a model with one layer, before the predicted step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use accounting::activation_plan::{ActivationPlan, LayerChoice, LayerCost, least_recomputation, peak_bytes};
use models::module::{Input, LanguageModel, trainable};
use runtime::autograd::{Backward, Forward, Function, GradMode, apply, backward, set_grad};
use runtime::device::synchronize;
use runtime::measure::Samples;
use runtime::memory::{Region, live_bytes};
use tch::{Device, Tensor};

use super::{Activations, LayerPlan, LayerProbe, WHAT};
use crate::error::{Error, Result};

/// Predicts the cost of steps. See the [module](self).
#[derive(Debug, Clone, PartialEq)]
pub struct StepPredictor {
    /// The cost of one layer.
    pub layer: LayerProbe,
    /// Seconds of a step outside of the layers: embedding, last norm, head.
    pub outside_seconds: f64,
    /// E: bytes kept outside the layers at the end of the forward of the hidden states.
    pub outside_bytes: u64,
    /// E': bytes kept outside the layers during their backward.
    pub behind_head_bytes: u64,
    /// D: bytes that the head's forward and backward need in addition.
    pub head_bytes: u64,
}

/// The cost of a step beyond what is alive between steps (weights, gradients, optimizer state).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepCost {
    /// Peak bytes on the device.
    pub peak_bytes: u64,
    /// Bytes on the host.
    pub host_bytes: u64,
    /// Seconds of forward and backward.
    pub seconds: f64,
}

impl StepPredictor {
    /// Measures `model` on one batch, in `rounds` rounds; its first layer stands for all, so a model with one layer is enough.
    /// The model's gradients are cleared; its plan is restored.
    ///
    /// # Errors
    /// A model whose blocks share values, so that one cannot be measured alone; as [`Activations::probe`].
    pub fn measure(
        model: &mut dyn LanguageModel,
        activations: &Activations,
        input: &Input<'_>,
        labels_bt: &Tensor,
        rounds: usize,
    ) -> Result<Self> {
        if !model.has_separate_blocks() {
            let reason = "the layers of this model differ and share values, so none can be measured for all; give a plan for the layers, such as \
                          recompute all";
            return Err(Error::config(WHAT, reason));
        }
        let before = activations.plan();
        let result = Self::measure_keeping(model, activations, input, labels_bt, rounds);
        activations.change(&before)?;
        // Gradients left from the measurement would be added to the first step's.
        for (_, tensor) in trainable(&*model) {
            set_grad(tensor, None)?;
        }
        result
    }

    fn measure_keeping(
        model: &mut dyn LanguageModel,
        activations: &Activations,
        input: &Input<'_>,
        labels_bt: &Tensor,
        rounds: usize,
    ) -> Result<Self> {
        let _grad = GradMode::on();
        let device = input.tokens.device();
        let layers = activations.plan().len();
        activations.change(&vec![LayerPlan::KeepAll; layers])?;
        let hidden = model.hidden(input)?.f_detach()?;
        let layer = activations.probe(model, &hidden, &input.context, rounds)?;
        drop(hidden);

        let mut seconds = Vec::new();
        for round in 0..=rounds {
            synchronize(device)?;
            let start = Instant::now();
            backward(&[&model.loss(input, labels_bt)?.sum])?;
            synchronize(device)?;
            if round > 0 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        let outside_seconds =
            (Samples { samples: seconds }.median() - layers as f64 * layer.seconds).max(0.0);

        let of_layers = layers as u64 * layer.cost(LayerPlan::KeepAll).map_or(0, |cost| cost.held_bytes);
        let alive = live_bytes(device)?;
        let hidden = model.hidden(input)?;
        // Something else of the process may have freed memory meanwhile.
        let outside_bytes = live_bytes(device)?.saturating_sub(alive + of_layers);
        // The head alone, for its own peak.
        let head_input = hidden.f_detach()?.f_set_requires_grad(true)?;
        let region = Region::start(device)?;
        backward(&[&model.head().loss(&head_input, labels_bt, &input.context)?.sum])?;
        let head_bytes = region.finish()?.peak_above_start();
        drop(head_input);
        // The whole model, for what the head leaves behind. Its input and that input's gradient are freed at the last norm.
        let ends_with_norm = 2 * (hidden.numel() * hidden.kind().elt_size_in_bytes()) as u64;
        let at_mark = Arc::new(AtomicU64::new(0));
        let [marked] = apply(Mark { live: at_mark.clone(), device }, &[&hidden])?;
        drop(hidden);
        let loss = model.head().loss(&marked, labels_bt, &input.context)?.sum;
        drop(marked);
        backward(&[&loss])?;
        let behind_head_bytes =
            at_mark.load(Ordering::SeqCst).saturating_sub(alive + of_layers + ends_with_norm);
        Ok(Self { layer, outside_seconds, outside_bytes, behind_head_bytes, head_bytes })
    }

    /// Predicts a step with as many layers as `plan` has entries.
    ///
    /// # Errors
    /// A byte count beyond 64 bits.
    pub fn step(&self, plan: &[LayerPlan]) -> Result<StepCost> {
        let costs: Vec<LayerCost> = plan.iter().filter_map(|&of| self.layer.cost(of)).collect();
        let kept: u64 = costs.iter().map(|cost| cost.held_bytes).sum();
        let at_the_head = self.outside_bytes + kept + self.head_bytes;
        let in_the_layers = self.behind_head_bytes + peak_bytes(costs.iter().copied())?;
        let recomputed: f64 = costs.iter().map(|cost| cost.recompute_seconds).sum();
        Ok(StepCost {
            peak_bytes: at_the_head.max(in_the_layers),
            host_bytes: costs.iter().map(|cost| cost.host_bytes).sum(),
            seconds: self.outside_seconds + plan.len() as f64 * self.layer.seconds + recomputed,
        })
    }

    /// Returns the plan with the least recomputation for `layers` layers whose step stays within `budget` bytes beyond what is
    /// alive between steps. The head's need is counted for every layer, as for the last; if the head needs more than a layer, a
    /// cheaper plan may exist.
    ///
    /// # Errors
    /// No plan fits; the message names the smallest budget that does.
    pub fn least_recomputation(&self, layers: usize, budget: u64) -> Result<ActivationPlan<LayerPlan>> {
        let outside = self.behind_head_bytes;
        let head = (self.outside_bytes + self.head_bytes).saturating_sub(outside);
        let with_head = |choice: &LayerChoice<LayerPlan>| {
            let transient_bytes = choice.cost.transient_bytes.max(head);
            LayerChoice { cost: LayerCost { transient_bytes, ..choice.cost }, ..*choice }
        };
        let choices: Vec<LayerChoice<LayerPlan>> = self.layer.choices.iter().map(with_head).collect();
        let Some(left) = budget.checked_sub(outside) else {
            let reason = format!(
                "a budget of {budget} B is less than the {outside} B that the model keeps outside its layers"
            );
            return Err(Error::config(WHAT, reason));
        };
        Ok(least_recomputation(layers, &choices, left)?)
    }
}

/// Passes a tensor through; in backward records the bytes alive when its gradient arrives.
struct Mark {
    live: Arc<AtomicU64>,
    device: Device,
}

impl Function for Mark {
    fn forward(&mut self, _: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        Ok(vec![inputs[0].f_detach()?])
    }

    fn backward(&self, _: &mut Backward, grads: Vec<Option<Tensor>>) -> runtime::Result<Vec<Option<Tensor>>> {
        self.live.store(live_bytes(self.device)?, Ordering::SeqCst);
        Ok(grads)
    }
}
