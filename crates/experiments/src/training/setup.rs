//! A training with any of the injected inefficiencies.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use amp::Autocast;
use anyhow::{Context, Result};
use dataloading::loader::LoaderConfig;
use dataloading::{BatchConfig, Order, Samples};
use fused_ce::LinearCrossEntropy;
use models::module::{LanguageModel, LossHead, ModuleMapper, map_modules, trainable};
use models::{AttentionPath, Gpt2Like, Gpt2LikeConfig, Linear, NormKernel, ProjectionHead};
use runtime::precision;
use tch::{Device, Kind};
use trace::{Profile, TrainingFacts};
use training::Trainer;
use training::evaluation::evaluate;
use training::loader_batches::LoaderBatches;
use training::observer::{Collect, StepRecord};
use training::optimizer::{Adam, DeviceOptimizer, Group, Implementation, ZeroGrad};
use training::step_tracing::{self, Loading, TracedSteps};
use training::strategy::Strategy;
use training::trainer::TrainerConfig;

use super::injected_slowdowns::{
    HostReadsHead, IndexedLossHead, Inefficiency, TokenizePerItem, UnusedProjection,
};
use crate::corpus::Corpus;

/// Settings that all setups share.
#[derive(Debug, Clone)]
pub struct Common {
    /// The model; its vocabulary is set by the corpus.
    pub model: Gpt2LikeConfig,
    /// A width one below a multiple of 16, or nearly, with a number of heads that divides it.
    pub odd: (i64, i64),
    /// Samples of a batch. Packed batches have as many tokens on average.
    pub batch_size: usize,
    /// Learning rate of Adam.
    pub lr: f64,
    /// Where.
    pub device: Device,
    /// Seed of weights and order.
    pub seed: u64,
}

/// Techniques that a training may have beyond the assignment's script.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Techniques {
    /// Products in bf16, weights in fp32.
    pub mixed_precision: bool,
    /// The fused layer norm.
    pub fused_norms: bool,
    /// The output projection and the cross-entropy as one operation.
    pub fused_loss: bool,
}

/// A training that can be run step by step.
pub struct Setup {
    /// The loop.
    pub trainer: Trainer,
    /// Its data.
    pub batches: LoaderBatches,
    steps: Collect,
    workers: usize,
    pinned: bool,
}

impl Setup {
    /// A training with the inefficiencies that are `on`, and none of the others, and with the fused norm.
    ///
    /// # Errors
    /// Errors of the data, the model and the loop.
    pub fn new(corpus: &Corpus, on: &BTreeSet<Inefficiency>, common: &Common) -> Result<Self> {
        Self::with(corpus, on, Techniques { fused_norms: true, ..Default::default() }, common)
    }

    /// A training with the inefficiencies that are `on` and these techniques, and none of the others.
    ///
    /// # Errors
    /// Errors of the data, the model and the loop.
    pub fn with(
        corpus: &Corpus,
        on: &BTreeSet<Inefficiency>,
        techniques: Techniques,
        common: &Common,
    ) -> Result<Self> {
        let has = |inefficiency| on.contains(&inefficiency);
        let &Common { batch_size, lr, device, seed, .. } = common;
        runtime::random::seed(seed)?;
        let mut config = Gpt2LikeConfig { vocab_size: corpus.vocabulary(), ..common.model.clone() };
        if has(Inefficiency::OddWidth) {
            (config.hidden_dim, config.num_heads) = common.odd;
        }
        config.attention = match (has(Inefficiency::ExplicitAttention), has(Inefficiency::MaskPerForward)) {
            (true, _) => AttentionPath::Explicit,
            (false, true) => AttentionPath::DenseMask,
            (false, false) => AttentionPath::Fused,
        };
        config.norms = if techniques.fused_norms { NormKernel::Fused } else { NormKernel::Libtorch };
        let max_length = config.max_length as usize;
        let samples: Arc<dyn Samples> = if has(Inefficiency::TokenizePerItem) {
            Arc::new(TokenizePerItem::new(corpus.texts.clone(), corpus.tokenizer.clone(), max_length)?)
        } else {
            corpus.train.clone()
        };
        let strategy = if has(Inefficiency::PadToMax) { Strategy::Base } else { Strategy::Packed };
        let options = BatchConfig { batch_size, max_length, pad: corpus.pad(), seed, ..Default::default() };
        let workers = usize::from(!has(Inefficiency::NoWorkers));
        let pinned = !has(Inefficiency::Unpinned);
        let loader = LoaderConfig { workers, device, pinned, epochs: None, ..Default::default() };
        let batches = LoaderBatches::new(strategy.source(samples, &options)?, &loader)?;

        let kind = (Kind::Float, device);
        let (hidden, mut model) = (config.hidden_dim, Gpt2Like::new(&config, kind)?);
        if techniques.fused_loss {
            LinearCrossEntropy::default().install(&mut model)?;
        }
        map_modules(&mut model, &mut Heads(on))?;
        let model: Box<dyn LanguageModel> = if has(Inefficiency::UnusedProjection) {
            Box::new(UnusedProjection::new(model, hidden, kind)?)
        } else {
            Box::new(model)
        };
        let implementation =
            if has(Inefficiency::UnfusedOptimizer) { Implementation::ForLoop } else { Implementation::Fused };
        let optimizer = DeviceOptimizer::new(Adam::default(), vec![Group::new(trainable(&*model), lr)])?
            .with_implementation(implementation);
        let zero_grad = if has(Inefficiency::ZeroedGradients) { ZeroGrad::ToZeros } else { ZeroGrad::ToNone };
        let accuracy = has(Inefficiency::AccuracyEachStep);
        let mut trainer = Trainer::new(
            model,
            Box::new(optimizer),
            TrainerConfig { steps: 0, accuracy, zero_grad, ..Default::default() },
        )?;
        if techniques.mixed_precision {
            trainer.precision = Some(Autocast::new(Kind::BFloat16)?.policy());
        }
        let steps = Collect::default();
        trainer.observers.push(Box::new(steps.clone()));
        Ok(Self { trainer, batches, steps, workers, pinned })
    }

    /// Runs so many steps more, and returns their records.
    ///
    /// # Errors
    /// Errors of the loop.
    pub fn run(&mut self, steps: u64) -> Result<Vec<StepRecord>> {
        self.trainer.options.steps = self.trainer.step() + steps;
        self.trainer.run(&mut self.batches, None)?;
        Ok(self.steps.take())
    }

    /// The mean loss over the corpus's validation lines, computed as the training computes.
    ///
    /// # Errors
    /// Errors of the data and the model.
    pub fn validation_loss(&self, corpus: &Corpus, common: &Common) -> Result<f64> {
        let &Common { batch_size, device, .. } = common;
        let max_length = self.trainer.model.max_sequence() as usize;
        let (order, pad) = (Order::Sequential, corpus.pad());
        let options = BatchConfig { batch_size, max_length, pad, order, ..Default::default() };
        let source = Strategy::Standard.source(corpus.validation.clone(), &options)?;
        let loader = LoaderConfig { workers: 1, device, epochs: Some(1), ..Default::default() };
        let mut batches = LoaderBatches::new(source, &loader)?;
        let _precision = self.trainer.precision.clone().map(|policy| precision::enter(Some(policy)));
        Ok(evaluate(&*self.trainer.model, &mut batches, self.trainer.step())?.loss)
    }

    /// Runs so many steps more under the profiler, keeps the trace at `path` for Perfetto, and reads it back, with what
    /// can be known of the run besides.
    ///
    /// # Errors
    /// Errors of the loop and of the profiler; a file that cannot be written.
    pub fn trace(&mut self, steps: u64, path: &Path) -> Result<(Profile, TrainingFacts)> {
        let loading = Loading { workers: self.workers, pinned: self.pinned };
        let until = self.trainer.step() + steps;
        self.trainer.options.steps = until;
        let traced = step_tracing::trace(&mut self.trainer, &mut self.batches, None, steps, loading, path)?;
        drop(self.steps.take());
        let TracedSteps { profile, facts } =
            traced.with_context(|| format!("profile: the data ended before step {until}"))?;
        Ok((profile, facts))
    }
}

impl std::fmt::Debug for Setup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Setup").field("trainer", &self.trainer).finish_non_exhaustive()
    }
}

/// Puts the slow heads around the model's own.
struct Heads<'a>(&'a BTreeSet<Inefficiency>);

impl ModuleMapper for Heads<'_> {
    fn loss_head(&mut self, name: &str, slot: &mut Box<dyn LossHead>) -> models::Result<()> {
        // The visit continues into the replacement, which has the same name.
        if name != "output_linear" || self.0.is_empty() {
            return Ok(());
        }
        let on = std::mem::replace(&mut self.0, NONE.get_or_init(BTreeSet::new));
        let mut wrap = |with: fn(Box<dyn LossHead>) -> Box<dyn LossHead>| -> models::Result<()> {
            let placeholder = ProjectionHead::new(Linear::new(1, 1, false, (Kind::Float, Device::Cpu))?);
            let head = std::mem::replace(slot, Box::new(placeholder) as Box<dyn LossHead>);
            *slot = with(head);
            Ok(())
        };
        if on.contains(&Inefficiency::IndexedLoss) {
            wrap(|head| Box::new(IndexedLossHead(head)))?;
        }
        if on.contains(&Inefficiency::HostReads) {
            wrap(|head| Box::new(HostReadsHead(head)))?;
        }
        Ok(())
    }
}

static NONE: std::sync::OnceLock<BTreeSet<Inefficiency>> = std::sync::OnceLock::new();
