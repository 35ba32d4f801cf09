//! What `accounting` says before anything runs.

use accounting::decoder_flops::Workload;
use accounting::memory::logits::Loss;
use accounting::memory::recipe::Recipe;
use accounting::offload::sizes::{self, Choices, Logits};
use accounting::offload::{Job, Method, OptimizerPlace, Rates, Setup, Start, simulate};
use accounting::recompute::NormKernel;
use anyhow::Context;
use models::LlamaConfig;
use tch::Kind;

use super::subject::HEAD_TOKENS;

/// Rates for what does not depend on them: who is on the device when.
pub(crate) const NOMINAL: Rates = Rates { load: 5e9, store: 5e9, host_optimizer: 1e9, device_optimizer: 1e9 };

/// A step that is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// One forward, which gives the last token's logits.
    Inference,
    /// Forward, backward and optimizer over all weights.
    Training,
}

/// How fast a machine computes: FLOP/s of products, and bytes per second of memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Speed {
    pub(crate) flops: f64,
    pub(crate) bandwidth: f64,
}

impl Speed {
    /// For what does not depend on it.
    pub(crate) const NOMINAL: Self = Self { flops: 1e11, bandwidth: 2e10 };
}

/// The number formats of a model in `kind`.
pub(crate) fn choices(kind: Kind, speed: Speed, chunk: i64) -> Choices {
    Choices {
        flops: speed.flops,
        bandwidth: speed.bandwidth,
        recipe: if kind == Kind::Float { Recipe::FP32 } else { Recipe::BF16 },
        loss: Loss::LinearCrossEntropy { tokens: chunk.unsigned_abs() },
        norm: NormKernel::Output,
        logits: Logits::LastToken,
        ..Choices::default()
    }
}

/// The step of a model that reads one row.
///
/// # Errors
/// A shape that is none.
pub(crate) fn job(
    config: &LlamaConfig,
    (kind, speed): (Kind, Speed),
    tokens: i64,
    step: Step,
) -> anyhow::Result<Job> {
    let model = ::training::predicted::decoder(config)?;
    let work = Workload { batch: 1, sequence: u64::try_from(tokens).context("tokens below 0")? };
    let choices = choices(kind, speed, HEAD_TOKENS.min(tokens));
    match step {
        Step::Training => Ok(sizes::training(&model, work, &choices)?),
        Step::Inference => Ok(sizes::inference(&model, work, &choices)?),
    }
}

/// Bytes of the device at the peak of a step. The optimizer's state, and the gradients that the host takes, are not in it.
///
/// # Errors
/// Those of the simulation.
pub(crate) fn peak(job: &Job, method: Method) -> anyhow::Result<u64> {
    let setup = Setup { method, resident: Vec::new(), optimizer: OptimizerPlace::Host };
    let mut job = job.clone();
    // Forward and backward alone.
    job.fixed.state_bytes = 0;
    job.layers.iter_mut().for_each(|layer| layer.state_bytes = 0);
    Ok(simulate(&job, &NOMINAL, &setup, Start::Warm)?.device.total)
}
