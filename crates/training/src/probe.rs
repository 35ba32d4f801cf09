//! What one forward and backward pass shows, in the middle of a training that does not notice.

use dataloading::Counts;
use models::module::trainable;
use runtime::profile::{Counter, Flops};
use runtime::random::RandomState;

use crate::accumulation::{fetch, forward};
use crate::batches::Batches;
use crate::error::Result;
use crate::optimizer::{StepSettings, ZeroGrad};
use crate::trainer::Trainer;

/// What a pass over the next batch showed.
#[derive(Debug, Clone, PartialEq)]
pub struct Probe {
    /// Floating-point operations of forward and backward, exact.
    pub flops: Flops,
    /// What the batch consisted of.
    pub counts: Counts,
    /// Names of the trainable parameters that the backward pass did not reach.
    pub without_gradient: Vec<String>,
    /// Elements of those together.
    pub elements_without_gradient: u64,
}

impl Probe {
    /// Runs the model over the next batch of `train`, forward and backward; `None` where the data has ended. Data and random
    /// generators are put back to where they stood and the gradients are cleared, so call it between steps.
    ///
    /// # Errors
    /// Those of the data and of the model.
    pub fn run(trainer: &mut Trainer, train: &mut dyn Batches) -> Result<Option<Self>> {
        let (data, random) = (train.state(), RandomState::capture_all()?);
        let Some(micro) = fetch(train, 1)? else { return Ok(None) };
        let Some(batch) = micro.batches.first() else { return Ok(None) };
        let model = trainer.model.as_ref();
        trainer.optimizer.zero_grad(ZeroGrad::ToNone)?;
        // One of two micro-batches, so that nobody steps within backward.
        trainer.optimizer.begin(StepSettings { micro_batches: 2, ..StepSettings::default() })?;
        let counter = Counter::on_this_thread()?;
        let output = forward(model, batch, true, false)?;
        runtime::autograd::backward(&[&output.sum])?;
        let flops = counter.finish()?.total.flops;
        let (mut without_gradient, mut elements_without_gradient) = (Vec::new(), 0);
        for (name, tensor) in trainable(model) {
            if !tensor.f_grad()?.defined() {
                elements_without_gradient += tensor.numel() as u64;
                without_gradient.push(name);
            }
        }
        trainer.optimizer.zero_grad(ZeroGrad::ToNone)?;
        train.resume(&data)?;
        random.restore()?;
        Ok(Some(Self { flops, counts: batch.counts, without_gradient, elements_without_gradient }))
    }

    /// FLOPs of forward and backward for each place, padding included; attention counts every pair of a query and a key
    /// within a document.
    pub fn flops_per_place(&self) -> f64 {
        self.flops.dense as f64 / (self.counts.tokens + self.counts.padding).max(1) as f64
    }
}
