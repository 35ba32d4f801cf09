//! What `accounting` says before anything runs.

use accounting::decoder_flops::Workload;
use accounting::memory::logits::Loss;
use accounting::memory::recipe::Recipe;
use accounting::offload::sizes::{self, Choices};
use accounting::offload::{Job, Method, OptimizerPlace, Rates, Setup, Start, simulate};
use accounting::recompute::NormKernel;
use anyhow::Context;
use models::LlamaConfig;
use tch::Kind;

use super::subject::HEAD_TOKENS;
use crate::on_paper;

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
    let model = on_paper::decoder(config)?;
    let work = Workload { batch: 1, sequence: u64::try_from(tokens).context("tokens below 0")? };
    let choices = choices(kind, speed, HEAD_TOKENS.min(tokens));
    match step {
        Step::Training => Ok(sizes::training(&model, work, &choices)?),
        Step::Inference => Ok(last_logits(sizes::inference(&model, work, &choices)?, config, kind)),
    }
}

/// An inference that computes the last token's logits alone.
pub(crate) fn last_logits(mut job: Job, config: &LlamaConfig, kind: Kind) -> Job {
    let row = (config.vocab_size * kind.elt_size_in_bytes() as i64).unsigned_abs();
    // The last layer's output and its norm's are there for all tokens.
    job.working.head_bytes = row + 2 * job.working.input_bytes;
    job
}

/// Bytes of the device at an inference's peak.
///
/// # Errors
/// Those of the simulation.
pub(crate) fn peak(job: &Job, method: Method) -> anyhow::Result<u64> {
    let setup = Setup { method, resident: Vec::new(), optimizer: OptimizerPlace::Host };
    Ok(simulate(job, &NOMINAL, &setup, Start::Warm)?.device.total)
}

/// Bytes of the device at the peak of forward and backward of a training step of all weights, in fp32. The optimizer's state is not in
/// it.
///
/// `accounting::offload` takes a layer's gradients as there from the begin of its backward; the matrices' gradients come one by one while what
/// forward kept goes, which is what is added up here, with f the bytes of one wide activation, x of one narrow, K what a block keeps:
///
/// ```text
/// the gate's backward of layer i      (i + 1)·x + K + 2·f + ∂down + 2·x
/// its end                             (i + 1)·x + ∂layer + 3·x
/// the embedding's backward            x + ∂embedding, where it is tied and the head's gradient is there, + ∂layer 0 on its way home
/// ```
///
/// # Errors
/// Sizes that are none.
pub(crate) fn training_peak(config: &LlamaConfig, tokens: i64, method: Method) -> anyhow::Result<u64> {
    let job = job(config, (Kind::Float, Speed::NOMINAL), tokens, Step::Training)?;
    let size = |n: i64| u64::try_from(n).context("a size below 0");
    let &LlamaConfig {
        hidden_size,
        intermediate_size,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        ..
    } = config;
    let (rows, hidden, inner) = (4 * size(tokens)?, size(hidden_size)?, size(intermediate_size)?);
    let (heads, groups, head) = (size(num_attention_heads)?, size(num_key_value_heads)?, size(head_dim)?);
    let (narrow, wide) = (rows * hidden, rows * inner);
    let kept = rows * (2 * hidden + 2 * (heads + groups) * head + 3 * inner + heads + 2);
    let down = 4 * hidden * inner;
    let layers = job.layers.len() as u64;
    let layer = job.layers.first().map_or(0, |layer| layer.slot_bytes);
    let tied = if config.tie_word_embeddings { 4 * size(config.vocab_size)? * hidden } else { 0 };

    // Weights of layers on the device, gradients of other layers there at layer i's backward, what stays of a layer for it.
    let (weights, stay, each) = match method {
        Method::Resident { recompute } => (layers * layer, layer, if recompute { narrow } else { kept }),
        Method::OneAtATime => (layer, 0, narrow),
        Method::Overlap { ring } => ((ring as u64).min(layers) * layer, 0, narrow),
    };
    let of_block = if each == kept { 0 } else { kept };
    let on_its_way = if matches!(method, Method::Overlap { ring } if ring > 1) { layer } else { 0 };
    let mut most = layers * each + job.working.head_bytes;
    for index in 0..layers {
        let before = (layers - 1 - index) * stay + (index + 1) * each;
        most = most.max(before + of_block + 2 * wide + down + 2 * narrow);
        most = most.max(before + layer + 3 * narrow);
    }
    most = most.max(layers * stay + narrow + tied + on_its_way);
    let fixed = job.fixed.weight_bytes + job.fixed.gradient_bytes + job.working.constant_bytes;
    Ok(fixed + weights + most)
}
