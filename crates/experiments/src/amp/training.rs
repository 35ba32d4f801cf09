//! A whole training in one of the set-ups: losses, time of a gradient, scales.

use std::sync::Arc;

use amp::{Autocast, CastStatistics};
use anyhow::Result;
use dataloading::loader::LoaderConfig;
use dataloading::{BatchConfig, Order};
use models::module::{LanguageModel, trainable};
use models::state_dict::{load_state_dict, state_dict};
use models::{Gpt2Like, Gpt2LikeConfig};
use runtime::precision::{self, Policy};
use tch::{Device, Kind};
use training::Trainer;
use training::accumulation::{MicroBatches, fetch, forward};
use training::divergence::Divergence;
use training::evaluation::Evaluation;
use training::loader_batches::LoaderBatches;
use training::observer::StepRecord;
use training::optimizer::Group;
use training::schedule::{LrSchedule, Shape};
use training::strategy::Strategy;
use training::trainer::TrainerConfig;

use super::setup::{Parts, Scales, Setup};
use crate::corpus::Corpus;
use crate::training_recorder::TrainingRecorder;

/// Settings that all trainings of a comparison share.
#[derive(Debug, Clone)]
pub(crate) struct Training {
    /// The model; its vocabulary is set by the corpus.
    pub model: Gpt2LikeConfig,
    /// How batches are made.
    pub strategy: Strategy,
    /// Samples of a batch.
    pub batch_size: usize,
    /// Steps; the data is repeated as often as they want.
    pub steps: u64,
    /// Learning rate of Adam.
    pub lr: f64,
    /// Steps of linear warm-up.
    pub warmup: u64,
    /// Steps between evaluations.
    pub evaluate_every: u64,
    /// The scalers' constants.
    pub scales: Scales,
    /// Where.
    pub device: Device,
    /// Seed of weights and order.
    pub seed: u64,
}

/// A point of the validation curve.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Point {
    /// Steps done.
    pub step: u64,
    /// Mean validation loss in nats, computed as the training computes.
    pub loss: f64,
    /// Share of the validation's targets predicted right.
    pub accuracy: f64,
}

/// The result of a training.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outcome {
    /// Every step.
    pub steps: Vec<StepRecord>,
    /// Validation, the last one after the last step. Empty where the training diverged at once.
    pub curve: Vec<Point>,
    /// Why it did not come to its end: the loss was not finite for many steps in a row, or no scale helped.
    pub diverged: Option<String>,
    /// The most bytes that were live during a training step, beyond what was before the training.
    pub peak_bytes: u64,
    /// Statistics of the cache of casts.
    pub casts: Option<CastStatistics>,
}

impl Outcome {
    /// Seconds of forward and backward, step by step, without the first ones.
    pub(crate) fn gradient_seconds(&self) -> Vec<f64> {
        self.settled().map(|step| step.timings.forward + step.timings.backward).collect()
    }

    /// Seconds of unscaling, clipping and the optimizer, likewise.
    pub(crate) fn optimizer_seconds(&self) -> Vec<f64> {
        self.settled().map(|step| step.timings.optimizer).collect()
    }

    /// How often gradients were computed again because they overflowed.
    pub(crate) fn retries(&self) -> u32 {
        self.steps.iter().map(|step| step.retries).sum()
    }

    fn settled(&self) -> impl Iterator<Item = &StepRecord> {
        const FIRST: usize = 3;
        self.steps.iter().skip(if self.steps.len() > FIRST { FIRST } else { 0 })
    }

    /// Steps that were left out because a gradient was not finite.
    pub(crate) fn skipped(&self) -> usize {
        self.steps.iter().filter(|step| step.skipped).count()
    }

    /// How often the scale changed from one step to the next.
    pub(crate) fn scale_changes(&self) -> usize {
        self.steps.windows(2).filter(|pair| pair[0].scale != pair[1].scale).count()
    }

    /// The last validation, if the training was completed.
    pub(crate) fn last(&self) -> Option<Point> {
        self.curve.last().copied().filter(|point| self.diverged.is_none() && point.loss.is_finite())
    }
}

/// Trains once in `setup`. A divergence is an outcome, no error.
///
/// # Errors
/// Errors of the data, the model and the loop.
pub(crate) fn train(corpus: &Corpus, setup: Setup, training: &Training) -> Result<Outcome> {
    let device = training.device;
    let before = runtime::memory::live_bytes(device)?;
    let Prepared { mut trainer, mut batches, mut validation, autocast } = prepare(corpus, setup, training)?;
    let recorder = TrainingRecorder::attach(&mut trainer, device)?;
    let ended = trainer.run(&mut batches, Some(&mut validation)).map(|_| ());
    let ended = ended.and_then(|()| trainer.evaluate(&mut validation).map(|_| ()));
    drop(trainer);
    let seen = recorder.seen();
    let point = |&Evaluation { step, loss, accuracy, .. }: &Evaluation| Point { step, loss, accuracy };
    let mut outcome = Outcome {
        steps: seen.steps.clone(),
        curve: seen.evaluations.iter().map(point).collect(),
        ..Outcome::default()
    };
    match ended {
        Ok(()) => {}
        Err(
            error @ (training::Error::Diverged { .. }
            | training::Error::NonFiniteWeight { .. }
            | training::Error::Overflowed(_)),
        ) => outcome.diverged = Some(error.to_string()),
        Err(error) => return Err(error.into()),
    }
    if outcome.curve.last().is_some_and(|point| !point.loss.is_finite()) {
        outcome.diverged.get_or_insert_with(|| "the validation loss is not finite".to_owned());
    }
    outcome.peak_bytes = seen.peak_bytes().saturating_sub(before);
    outcome.casts = autocast.map(|autocast| autocast.statistics());
    Ok(outcome)
}

struct Prepared {
    trainer: Trainer,
    batches: LoaderBatches,
    validation: LoaderBatches,
    autocast: Option<Autocast>,
}

fn prepare(corpus: &Corpus, setup: Setup, training: &Training) -> Result<Prepared> {
    let &Training { strategy, batch_size, steps, lr, warmup, evaluate_every, device, seed, .. } = training;
    runtime::random::seed(seed)?;
    let max_length = training.model.max_length as usize;
    let options = BatchConfig { batch_size, max_length, pad: corpus.pad(), seed, ..Default::default() };
    let loader = LoaderConfig { workers: 1, device, epochs: None, ..Default::default() };
    let batches = LoaderBatches::new(strategy.source(corpus.train.clone(), &options)?, &loader)?;
    let measured_on = BatchConfig { order: Order::Sequential, ..options };
    let validation = Strategy::Standard.source(corpus.validation.clone(), &measured_on)?;
    let validation = LoaderBatches::new(validation, &LoaderConfig { epochs: Some(1), ..loader })?;

    let Parts { weights, autocast, scaler } = setup.parts(&training.scales)?;
    let model = gpt2_like(&training.model, corpus.vocabulary(), weights, device)?;
    let optimizer = setup.adam(Group::new(trainable(&*model), lr))?;
    let options = TrainerConfig {
        steps,
        accuracy: true,
        overflow: setup.overflow(),
        evaluate_every: Some(evaluate_every),
        divergence: Divergence { patience: 10, ..Default::default() },
        ..Default::default()
    };
    let mut trainer = Trainer::new(model, Box::new(optimizer), options)?;
    trainer.schedule = LrSchedule { warmup, shape: Shape::Constant, ..Default::default() };
    trainer.precision = autocast.as_ref().map(|autocast| autocast.policy());
    trainer.scaler = scaler;
    Ok(Prepared { trainer, batches, validation, autocast })
}

/// A model that was trained in fp32, and a batch that it was not trained on.
#[derive(Debug)]
pub(crate) struct Trained {
    model: Box<dyn LanguageModel>,
    batch: MicroBatches,
}

impl Trained {
    /// Trains once.
    ///
    /// # Errors
    /// Errors of the data, the model and the loop; validation data without a batch.
    pub(crate) fn in_fp32(corpus: &Corpus, training: &Training) -> Result<Self> {
        let Prepared { mut trainer, mut batches, mut validation, .. } =
            prepare(corpus, Setup::Fp32, training)?;
        trainer.run(&mut batches, None)?;
        let batch = fetch(&mut validation, 1)?
            .ok_or_else(|| training::Error::config("validation data", "it has no batch; give some tokens"))?;
        Ok(Self { model: trainer.model, batch })
    }

    /// The gradients of `scale` times the batch's mean loss, computed under `policy`, which sees them; they are not kept.
    ///
    /// # Errors
    /// Errors of the model and of the policy.
    pub(crate) fn backward(&self, policy: Arc<dyn Policy>, scale: f64) -> Result<()> {
        let _within = precision::enter(Some(policy));
        for batch in &self.batch.batches {
            let mean =
                forward(&*self.model, batch, true, false)?.sum.f_div_scalar(self.batch.denominator())?;
            runtime::autograd::backward(&[&mean.f_mul_scalar(scale)?])?;
        }
        for (_, parameter) in trainable(&*self.model) {
            runtime::autograd::set_grad(parameter, None)?;
        }
        Ok(())
    }
}

/// The assignment's model with the weights that fp32 draws, rounded to `kind`.
///
/// # Errors
/// Errors of the model.
pub(crate) fn gpt2_like(
    config: &Gpt2LikeConfig,
    vocabulary: i64,
    kind: Kind,
    device: Device,
) -> Result<Box<dyn LanguageModel>> {
    let config = Gpt2LikeConfig { vocab_size: vocabulary, ..config.clone() };
    let full = Gpt2Like::new(&config, (Kind::Float, device))?;
    if kind == Kind::Float {
        return Ok(Box::new(full));
    }
    let low = Gpt2Like::new(&config, (kind, device))?;
    load_state_dict(&low, &state_dict(&full), "the fp32 model")?;
    Ok(Box::new(low))
}
