//! Measures the cost of each plan on one layer.
//!
//! The layer runs once and twice in a row: the second run adds what a layer of a stack keeps, whichever tensors its neighbours
//! share with it. The backward of two gives the peak of one layer's backward. The plans are timed in turns, round by round, so
//! that a slow moment of the machine affects all alike.

use std::time::Instant;

use accounting::activation_plan::{LayerChoice, LayerCost};
use models::module::{Block, Context, Module, ModuleMapper, map_modules, trainable};
use parking_lot::Mutex;
use runtime::autograd::{self, Backward, Forward, Function, GradMode};
use runtime::device::synchronize;
use runtime::measure::Samples;
use runtime::memory::{Region, live_bytes};
use runtime::ops::TryScalar;
use tch::Tensor;

use super::{Activations, LayerPlan, WHAT};
use crate::error::{Error, Result};

/// The cost of each [`LayerPlan`] for one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerProbe {
    /// Seconds of one layer's forward and backward with keep-all.
    pub seconds: f64,
    /// The choices for `accounting::activation_plan`, in the order of [`LayerPlan::ALL`], without what the model cannot do.
    pub choices: Vec<LayerChoice<LayerPlan>>,
}

impl LayerProbe {
    /// Returns the cost of one plan.
    pub fn cost(&self, plan: LayerPlan) -> Option<LayerCost> {
        self.choices.iter().find(|choice| choice.of == plan).map(|choice| choice.cost)
    }
}

impl Activations {
    /// Measures the first block of `model`, which stands for all, on hidden states like `hidden_btd` (`[batch, sequence,
    /// hidden]`), in `rounds` rounds after one warm-up. Every trainable tensor of the block gets a gradient, as in a training
    /// where gradients accumulate; all gradients are cleared afterwards, and the plan is restored.
    ///
    /// # Errors
    /// 0 rounds; a model without blocks, or another number of blocks than the plan; a graph that holds the model; those of the
    /// block.
    pub fn probe(
        &self,
        model: &mut (impl Module + ?Sized),
        hidden_btd: &Tensor,
        context: &Context<'_>,
        rounds: usize,
    ) -> Result<LayerProbe> {
        if rounds == 0 {
            return Err(Error::config(WHAT, "0 rounds measure nothing; expected at least 1"));
        }
        let before = self.plan();
        let mut first = First { activations: self, hidden_btd, context, rounds, result: None };
        let ended = map_modules(model, &mut first);
        let result = first.result;
        self.change(&before)?;
        ended?;
        result.ok_or_else(|| Error::config(WHAT, "the model has no block to measure"))?
    }
}

struct First<'a> {
    activations: &'a Activations,
    hidden_btd: &'a Tensor,
    context: &'a Context<'a>,
    rounds: usize,
    result: Option<Result<LayerProbe>>,
}

impl ModuleMapper for First<'_> {
    fn block(&mut self, _: &str, slot: &mut Box<dyn Block>) -> models::Result<()> {
        if self.result.is_none() {
            self.result = Some(self.measure(&**slot));
        }
        Ok(())
    }
}

impl First<'_> {
    fn measure(&self, block: &dyn Block) -> Result<LayerProbe> {
        let _grad = GradMode::on();
        let possible = |plan: &LayerPlan| {
            *plan != LayerPlan::RecomputeAttention || self.activations.can_recompute_attention
        };
        let plans: Vec<LayerPlan> = LayerPlan::ALL.into_iter().filter(possible).collect();
        let layers = self.activations.switches.len();
        let mut seconds: Vec<Vec<f64>> = vec![Vec::new(); plans.len()];
        for round in 0..=self.rounds {
            for turn in 0..plans.len() {
                let index = (turn + round) % plans.len();
                self.activations.change(&vec![plans[index]; layers])?;
                let took = self.step_seconds(block)?;
                // The first round warms caches up and creates the gradients that later rounds add to.
                if round > 0 {
                    seconds[index].push(took);
                }
            }
        }
        let costs = plans.iter().zip(&seconds).map(|(&of, taken)| {
            self.activations.change(&vec![of; layers])?;
            let longer: Vec<f64> =
                taken.iter().zip(&seconds[0]).map(|(with, without)| with - without).collect();
            let recompute_seconds = Samples { samples: longer }.median().max(0.0);
            Ok(LayerChoice { of, cost: LayerCost { recompute_seconds, ..self.bytes(block)? } })
        });
        let choices = costs.collect::<Result<_>>()?;
        for (_, tensor) in trainable(block) {
            autograd::set_grad(tensor, None)?;
        }
        Ok(LayerProbe { seconds: Samples { samples: seconds[0].clone() }.median(), choices })
    }

    /// Returns the layer's input: not a leaf, so that the layer decides whether it is kept.
    fn input(&self) -> Result<Tensor> {
        let leaf = self.hidden_btd.f_detach()?.f_set_requires_grad(true)?;
        Ok(leaf.try_mul_scalar(1.0)?)
    }

    fn step_seconds(&self, block: &dyn Block) -> Result<f64> {
        let device = self.hidden_btd.device();
        let (input, gradient) = (self.input()?, self.hidden_btd.f_ones_like()?);
        synchronize(device)?;
        let start = Instant::now();
        let end = ended(block.forward(&input, self.context)?, gradient)?;
        drop(input);
        autograd::backward(&[&end])?;
        synchronize(device)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// With I for what a layer keeps besides its neighbours' tensors, one run keeps I and the output, and two in a row keep 2·I
    /// and the last output; whatever the layer keeps of its input or output is in the difference too.
    fn bytes(&self, block: &dyn Block) -> Result<LayerCost> {
        let device = self.hidden_btd.device();
        let state = || Ok::<_, Error>((live_bytes(device)?, self.activations.host_bytes()));
        let (before, _) = state()?;
        let gradient = self.hidden_btd.f_ones_like()?;
        let input = self.input()?;
        let once = block.forward(&input, self.context)?;
        drop(input);
        let after_one = state()?;
        let twice = block.forward(&once, self.context)?;
        drop(once);
        let after_two = state()?;
        let cost = LayerCost {
            held_bytes: after_two.0.saturating_sub(after_one.0),
            host_bytes: after_two.1.saturating_sub(after_one.1),
            ..LayerCost::default()
        };
        let end = ended(twice, gradient)?;
        let region = Region::start(device)?;
        autograd::backward(&[&end])?;
        let transient_bytes = region.finish()?.peak.saturating_sub(before + 2 * cost.held_bytes);
        Ok(LayerCost { transient_bytes, ..cost })
    }
}

/// Returns a scalar whose backward gives `output` the gradient `gradient`. It keeps neither longer than a stack would.
fn ended(output: Tensor, gradient: Tensor) -> Result<Tensor> {
    let [y] = autograd::apply(End(Mutex::new(Some(gradient))), &[&output])?;
    Ok(y)
}

struct End(Mutex<Option<Tensor>>);

impl Function for End {
    fn forward(&mut self, _: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        Ok(vec![Tensor::f_zeros([], (inputs[0].kind(), inputs[0].device()))?])
    }

    fn backward(&self, _: &mut Backward, _: Vec<Option<Tensor>>) -> runtime::Result<Vec<Option<Tensor>>> {
        Ok(vec![self.0.lock().take()])
    }
}
