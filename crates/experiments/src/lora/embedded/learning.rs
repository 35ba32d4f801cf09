//! A training: a model, an optimizer over what requires a gradient in it, and what its steps cost.

use std::time::Instant;

use models::module::{Context as Pass, IGNORE_INDEX, Input, LanguageModel, trainable};
use tch::{Kind, Tensor};
use training::clip::{NonFinite, clip_};
use training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};

/// Maximum gradient norm.
const LIMIT: f64 = 1.0;

/// Trains whatever of a model requires a gradient.
pub(crate) struct Learner<'m> {
    model: &'m dyn LanguageModel,
    optimizer: DeviceOptimizer,
    /// The loss of each step, in nats per labelled token.
    pub(crate) losses: Vec<f64>,
    /// Seconds of each step: forward, backward, clipping, optimizer.
    pub(crate) seconds: Vec<f64>,
}

impl<'m> Learner<'m> {
    /// Creates `AdamW`, whose decay leaves vectors alone.
    pub(crate) fn new(model: &'m dyn LanguageModel, lr: f64, weight_decay: f64) -> anyhow::Result<Self> {
        let groups = Group::by_dimension(trainable(model), lr, weight_decay);
        let rule = AdamW { beta2: 0.98, ..AdamW::default() };
        let optimizer = DeviceOptimizer::new(rule, groups)?;
        Ok(Self { model, optimizer, losses: Vec::new(), seconds: Vec::new() })
    }

    /// Takes a step at `factor` of the learning rate.
    pub(crate) fn step(&mut self, (tokens, labels): &(Tensor, Tensor), factor: f64) -> anyhow::Result<()> {
        let start = Instant::now();
        self.optimizer.set_factor(factor)?;
        let loss = mean_loss(self.model, tokens, labels, true)?;
        runtime::autograd::backward(&[&loss])?;
        clip_(&self.optimizer.gradients()?, LIMIT, NonFinite::Fail)?;
        self.optimizer.step()?;
        self.optimizer.zero_grad(ZeroGrad::ToNone)?;
        self.losses.push(loss.f_double_value(&[])?);
        self.seconds.push(start.elapsed().as_secs_f64());
        Ok(())
    }

    /// Bytes of the optimizer's state.
    pub(crate) fn state_bytes(&self) -> u64 {
        self.optimizer.state_bytes()
    }
}

/// The mean loss of the tokens that have a label.
fn mean_loss(
    model: &dyn LanguageModel,
    tokens: &Tensor,
    labels: &Tensor,
    training: bool,
) -> anyhow::Result<Tensor> {
    let input = Input { tokens, positions: None, context: Pass { training, ..Pass::default() } };
    let labelled = labels.f_ne(IGNORE_INDEX)?.f_sum(Kind::Int64)?;
    Ok(model.loss(&input, labels)?.sum.f_div(&labelled)?)
}

/// The loss of a batch, in nats per labelled token, without a step.
pub(crate) fn loss_of(model: &dyn LanguageModel, (tokens, labels): &(Tensor, Tensor)) -> anyhow::Result<f64> {
    let _no_grad = tch::no_grad_guard();
    Ok(mean_loss(model, tokens, labels, false)?.f_double_value(&[])?)
}
