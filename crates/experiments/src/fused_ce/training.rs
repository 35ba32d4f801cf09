//! The same training with each loss: the assignment's original, Malek's and Liger's.

use std::fmt;
use std::sync::Arc;

use accounting::memory::logits::Loss;
use anyhow::{Result, bail};
use dataloading::Order;
use dataloading::datasets::{PackedConfig, PackedDataset};
use dataloading::loader::LoaderConfig;
use dataloading::packing::PackingConfig;
use fused_ce::Chunk;
use models::module::{LanguageModel, trainable};
use models::{DecoderConfig, Llama};
use runtime::memory::live_bytes;
use tch::{Device, Kind};
use training::Trainer;
use training::activations::{Activations, LayerPlan};
use training::loader_batches::LoaderBatches;
use training::optimizer::{AdamW, DeviceOptimizer, Group};
use training::trainer::TrainerConfig;

use super::baselines::{self, Implementation, install};
use crate::corpus::Corpus;
use crate::training_recorder::TrainingRecorder;

/// An implementation of the loss in the assignment's comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Variant {
    /// All logits, as transformers does.
    Original,
    /// Malek's: gradients in forward, an eighth of the tokens at a time.
    Malek,
    /// Liger's: the same, and as many tokens at a time as make a chunk's logits about as large as the hidden states.
    Liger,
    /// The loss of `fused-ce`.
    Frugal,
}

impl Variant {
    /// All of them.
    pub(crate) const ALL: [Self; 4] = [Self::Original, Self::Malek, Self::Liger, Self::Frugal];

    /// The implementation, and its chunks of so many tokens.
    pub(crate) fn implementation(
        self,
        tokens: i64,
        hidden: i64,
        vocabulary: i64,
    ) -> (Implementation, Option<Chunk>) {
        match self {
            Self::Original => (Implementation::Naive, None),
            Self::Malek => (Implementation::GradInForward, None),
            Self::Liger => {
                let parts = ((vocabulary + hidden - 1) / hidden).max(1);
                let chunk = ((tokens + parts - 1) / parts).max(1).unsigned_abs().next_power_of_two();
                (Implementation::GradInForward, Some(Chunk::Tokens(i64::try_from(chunk).unwrap_or(i64::MAX))))
            }
            Self::Frugal => (Implementation::RoundedGradient, None),
        }
    }
}

impl Variant {
    /// The same in the words of `accounting`.
    ///
    /// # Errors
    /// Same as [`Implementation::loss`].
    pub(crate) fn predicted_loss(
        self,
        tokens: i64,
        [hidden, vocabulary]: [i64; 2],
        device: Device,
    ) -> Result<Loss> {
        let (implementation, chunk) = self.implementation(tokens, hidden, vocabulary);
        let of_ours = implementation.options().map(|_| Implementation::LinearCrossEntropy);
        let name = of_ours.unwrap_or(implementation).name();
        let composed = || baselines::chunk_tokens(chunk, tokens, vocabulary, 4);
        let rows = match implementation {
            Implementation::Naive => tokens,
            Implementation::LinearCrossEntropy
            | Implementation::RoundedGradient
            | Implementation::RoundedLogits => {
                fused_ce::default_chunk_tokens(tokens, vocabulary, Kind::Float, device)
            }
            Implementation::ChunkedRecompute | Implementation::GradInForward => composed()?,
        };
        Ok(Loss::from_name(name, rows.unsigned_abs())?)
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Original => "original",
            Self::Malek => "malek",
            Self::Liger => "liger",
            Self::Frugal => "frugal",
        })
    }
}

/// Sizes of the comparison.
#[derive(Clone, Debug)]
pub(crate) struct Training {
    /// The model.
    pub model: DecoderConfig,
    /// Rows of a batch.
    pub batch_size: usize,
    /// Tokens of a row.
    pub sequence: usize,
    /// Dtype of the model; in 16 bits the optimizer has fp32 master weights.
    pub kind: Kind,
    /// Steps.
    pub steps: u64,
    /// Learning rate of AdamW.
    pub lr: f64,
    /// Where.
    pub device: Device,
    /// Seed of weights and order.
    pub seed: u64,
}

/// The result of a training.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// The loss of each step.
    pub losses: Vec<f64>,
    /// Positions of a step.
    pub positions: usize,
    /// Seconds of each step but the first two.
    pub seconds: Vec<f64>,
    /// The most bytes that were live during a step, beyond what was before the training.
    pub peak_bytes: u64,
}

/// A model whose loss is computed by `variant`.
///
/// # Errors
/// Errors of the model.
pub(crate) fn model(
    config: &DecoderConfig,
    variant: Variant,
    tokens: i64,
    options: (Kind, Device),
) -> Result<Box<dyn LanguageModel>> {
    let mut model = Llama::new(config, options)?;
    let (implementation, chunk) = variant.implementation(tokens, config.hidden_size, config.vocab_size);
    install(&mut model, implementation, chunk)?;
    Ok(Box::new(model))
}

/// Trains once.
///
/// # Errors
/// Errors of the data, the model and the loop.
pub(crate) fn train(corpus: &Corpus, variant: Variant, training: &Training) -> Result<Outcome> {
    let &Training { batch_size, sequence, steps, lr, device, seed, .. } = training;
    let before = live_bytes(device)?;
    runtime::random::seed(seed)?;
    let options = PackedConfig {
        rows: batch_size,
        plan: PackingConfig { capacity: sequence, ..PackingConfig::default() },
        pad: corpus.pad(),
        seed,
        order: Order::Shuffled,
        ..PackedConfig::default()
    };
    let source = Arc::new(PackedDataset::new(corpus.train.clone(), &options)?);
    let loader = LoaderConfig { workers: 1, device, epochs: None, ..Default::default() };
    let mut batches = LoaderBatches::new(source, &loader)?;
    let kind = training.kind;
    let mut model = model(&training.model, variant, (batch_size * sequence) as i64, (kind, device))?;
    let layers = training.model.num_hidden_layers as usize;
    let _activations = Activations::install(&mut *model, &vec![LayerPlan::RecomputeAll; layers])?;
    let optimizer = DeviceOptimizer::new(AdamW::default(), vec![Group::new(trainable(&*model), lr)])?;
    let optimizer = if kind == Kind::Float { optimizer } else { optimizer.with_master_weights() };
    let mut trainer =
        Trainer::new(model, Box::new(optimizer), TrainerConfig { steps, ..Default::default() })?;
    let recorder = TrainingRecorder::attach(&mut trainer, device)?;
    trainer.run(&mut batches, None)?;
    drop(trainer);
    let seen = recorder.seen();
    let positions = batch_size * sequence;
    if let Some(other) = seen.steps.iter().find(|step| step.tokens + step.padding != positions) {
        let has = other.tokens + other.padding;
        bail!("step {} has {has} positions instead of {positions}", other.step);
    }
    Ok(Outcome {
        positions,
        losses: seen.steps.iter().map(|step| step.loss).collect(),
        seconds: seen.steps.iter().skip(2).map(|step| step.timings.total).collect(),
        peak_bytes: seen.peak_bytes().saturating_sub(before),
    })
}
