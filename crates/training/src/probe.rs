//! Analyses one forward and backward pass in the middle of a training, without affecting it.

use dataloading::Counts;
use models::module::trainable;
use runtime::collectives::ReduceConfig;
use runtime::profile::{Counter, Flops};
use runtime::random::RandomState;
use tch::Tensor;

use crate::accumulation::{fetch, forward_over};
use crate::batches::Batches;
use crate::error::Result;
use crate::optimizer::{StepSettings, ZeroGrad};
use crate::ranks::Ranks;
use crate::trainer::Trainer;

/// The analysis of a pass over the next batch.
#[derive(Debug, Clone, PartialEq)]
pub struct StepProbe {
    /// Floating-point operations of forward and backward, exact.
    pub flops: Flops,
    /// Token counts of the batch.
    pub counts: Counts,
    /// Names of trainable parameters that got no gradient.
    pub without_gradient: Vec<String>,
    /// Number of their elements.
    pub elements_without_gradient: u64,
}

impl StepProbe {
    /// Runs forward and backward on the next batch of `train`, in the trainer's precision; `None` at the end of the data. Restores the
    /// position in the data and the random generators, and clears the gradients, also after an error, so call it between steps. All
    /// ranks call it.
    ///
    /// # Errors
    /// Errors of the data and of the model.
    pub fn run(trainer: &mut Trainer, train: &mut dyn Batches) -> Result<Option<Self>> {
        let (data, random) = (train.state(), RandomState::capture_all()?);
        let probed = Self::of_next_batch(trainer, train);
        let optimizer = &mut trainer.optimizer;
        let cleared = match &probed {
            Ok(_) => optimizer.zero_grad(ZeroGrad::ToNone),
            Err(_) => optimizer.abandon(ZeroGrad::ToNone).map(|_| ()),
        };
        // Each of them, whatever became of the others; the first error is the one to report.
        let (resumed, restored) = (train.resume(&data), random.restore());
        let probed = probed?;
        cleared.and(resumed)?;
        restored?;
        Ok(probed)
    }

    fn of_next_batch(trainer: &mut Trainer, train: &mut dyn Batches) -> Result<Option<Self>> {
        let Some(mut micro) = fetch(train, 1)? else { return Ok(None) };
        let counts = micro.batches.first().map(|batch| batch.counts).unwrap_or_default();
        if let Some(rows) = trainer.options.rows {
            micro = micro.split(rows)?;
        }
        trainer.optimizer.zero_grad(ZeroGrad::ToNone)?;
        // Announced as one micro-batch more, so that no optimizer steps during backward.
        let micro_batches = micro.batches.len() as u64 + 1;
        trainer.optimizer.begin(StepSettings { micro_batches, ..StepSettings::default() })?;
        let _precision = trainer.enter_precision();
        let ranks = trainer.optimizer.ranks();
        let sequence = ranks.as_ref().and_then(Ranks::sequence);
        let counter = Counter::on_this_thread()?;
        for batch in &micro.batches {
            let output = forward_over(trainer.model.as_ref(), batch, (true, false), (None, sequence), None)?;
            runtime::autograd::backward(&[&output.sum])?;
            // Every rank computes all of them, or its part of each: a round of one micro-batch of each.
            trainer.optimizer.reduce()?;
        }
        let flops = of_all_parts(counter.finish()?.total.flops, ranks.as_ref())?;
        let (mut without_gradient, mut elements_without_gradient) = (Vec::new(), 0);
        for (name, tensor) in trainable(trainer.model.as_ref()) {
            if !trainer.optimizer.has_gradient(tensor)? {
                elements_without_gradient += tensor.numel() as u64;
                without_gradient.push(name);
            }
        }
        Ok(Some(Self { flops, counts, without_gradient, elements_without_gradient }))
    }

    /// Returns the FLOPs of forward and backward per position, padding included; attention counts every pair of query and key within a
    /// document.
    pub fn flops_per_position(&self) -> f64 {
        self.flops.dense as f64 / (self.counts.tokens + self.counts.padding).max(1) as f64
    }
}

/// Returns the FLOPs of whole rows: the sum over the ranks that divide them. `own` are this rank's.
fn of_all_parts(own: Flops, ranks: Option<&Ranks>) -> Result<Flops> {
    let Some(ranks) = ranks.filter(|ranks| ranks.sequence().is_some()) else { return Ok(own) };
    let sums = Tensor::f_from_slice(&[own.dense.cast_signed(), own.causal.cast_signed()])?;
    ranks.all().all_reduce(&sums, ReduceConfig::default(), "work")?;
    // Each group of ranks has computed the same rows.
    let sums = Vec::<i64>::try_from(&sums)?;
    let [dense, causal] = [sums[0], sums[1]].map(|sum| sum.cast_unsigned() / ranks.turns() as u64);
    Ok(Flops { dense, causal })
}
