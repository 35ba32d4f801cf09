//! The whole training with each way of loading data: time, memory, and what it learned.

use std::time::Instant;

use anyhow::Result;
use dataloading::loader::{LoaderConfig, LoaderStats};
use dataloading::{BatchConfig, Order};
use models::module::trainable;
use models::{Gpt2Like, Gpt2LikeConfig};
use runtime::memory::Region;
use tch::{Device, Kind};
use training::Trainer;
use training::evaluation::Evaluation;
use training::loader_batches::LoaderBatches;
use training::optimizer::{Adam, DeviceOptimizer, Group};
use training::schedule::{LrSchedule, Shape};
use training::strategy::Strategy;
use training::trainer::TrainerConfig;

use crate::corpus::Corpus;
use crate::training_recorder::TrainingRecorder;

/// Settings that all trainings of a comparison share.
#[derive(Debug, Clone)]
pub(crate) struct Training {
    /// The model; its vocabulary is set by the corpus.
    pub model: Gpt2LikeConfig,
    /// Samples of a batch. Packed batches have as many tokens on average.
    pub batch_size: usize,
    /// How often the training data is gone through.
    pub epochs: u64,
    /// Learning rate of Adam.
    pub lr: f64,
    /// Steps of linear warm-up.
    pub warmup: u64,
    /// Steps between evaluations.
    pub evaluate_every: u64,
    /// Threads that make batches.
    pub workers: usize,
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
    /// Seconds of training until then; evaluations are not counted.
    pub seconds: f64,
    /// Tokens learned from until then, padding not counted.
    pub tokens: u64,
    /// Mean validation loss in nats.
    pub loss: f64,
    /// Share of the validation's targets predicted right.
    pub accuracy: f64,
}

/// The result of a training.
#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    /// Steps.
    pub steps: u64,
    /// Seconds, with the making of plans and samplers and without evaluations.
    pub seconds: f64,
    /// Tokens learned from.
    pub tokens: u64,
    /// Padding positions.
    pub padding: u64,
    /// The most bytes that were live during a training step, beyond what was before the training. Evaluations, whose
    /// batches are the same for every strategy, are not in it.
    pub peak_bytes: u64,
    /// The most that were live at any moment, evaluations included.
    pub peak_with_evaluation_bytes: u64,
    /// Seconds that the training waited for the loader.
    pub waited_seconds: f64,
    /// Statistics of the loader.
    pub loader: LoaderStats,
    /// Validation.
    pub curve: Vec<Point>,
}

impl Outcome {
    /// Seconds of training until the validation loss was first at or below `target`, between two evaluations in
    /// proportion; `None` where it never was.
    pub(crate) fn seconds_to(&self, target: f64) -> Option<f64> {
        let reached = self.curve.iter().position(|point| point.loss <= target)?;
        let at = self.curve[reached];
        let Some(before) = reached.checked_sub(1).map(|index| self.curve[index]) else {
            return Some(at.seconds);
        };
        let share = (before.loss - target) / (before.loss - at.loss);
        Some(before.seconds + share * (at.seconds - before.seconds))
    }

    /// The least validation loss.
    pub(crate) fn best_loss(&self) -> f64 {
        self.curve.iter().map(|point| point.loss).fold(f64::INFINITY, f64::min)
    }
}

/// Trains once with `strategy`.
///
/// # Errors
/// Errors of the data, the model and the loop.
pub(crate) fn train(corpus: &Corpus, strategy: Strategy, training: &Training) -> Result<Outcome> {
    let &Training { batch_size, epochs, lr, warmup, evaluate_every, workers, device, seed, .. } = training;
    runtime::random::seed(seed)?;
    let region = Region::start(device)?;
    let config = Gpt2LikeConfig { vocab_size: corpus.vocabulary(), ..training.model.clone() };
    let max_length = config.max_length as usize;
    let options = BatchConfig { batch_size, max_length, pad: corpus.pad(), seed, ..Default::default() };
    let loader = LoaderConfig { workers, device, epochs: Some(epochs), ..Default::default() };
    let prepared = Instant::now();
    let mut batches = LoaderBatches::new(strategy.source(corpus.train.clone(), &options)?, &loader)?;
    let seconds = prepared.elapsed().as_secs_f64();
    // Every strategy is measured on the same batches.
    let measured_on = BatchConfig { order: Order::Sequential, ..options };
    let validation = Strategy::Standard.source(corpus.validation.clone(), &measured_on)?;
    let mut validation = LoaderBatches::new(validation, &LoaderConfig { epochs: Some(1), ..loader })?;

    let model = Box::new(Gpt2Like::new(&config, (Kind::Float, device))?);
    let optimizer = DeviceOptimizer::new(Adam::default(), vec![Group::new(trainable(&*model), lr)])?;
    let mut trainer = Trainer::new(
        model,
        Box::new(optimizer),
        TrainerConfig { steps: u64::MAX, evaluate_every: Some(evaluate_every), ..Default::default() },
    )?;
    trainer.schedule = LrSchedule { warmup, shape: Shape::Constant, ..Default::default() };
    let recorder = TrainingRecorder::attach(&mut trainer, device)?;
    trainer.run(&mut batches, Some(&mut validation))?;
    trainer.evaluate(&mut validation)?;
    drop(trainer);
    let loader = batches.stats();
    let all = region.finish()?;
    let seen = recorder.seen();
    let mut outcome = Outcome {
        steps: seen.steps.len() as u64,
        seconds,
        tokens: 0,
        padding: 0,
        peak_bytes: seen.peak_bytes().saturating_sub(all.live_before),
        peak_with_evaluation_bytes: all.peak_above_start(),
        waited_seconds: 0.0,
        loader,
        curve: Vec::new(),
    };
    let mut evaluations = seen.evaluations.iter().peekable();
    for record in &seen.steps {
        outcome.seconds += record.timings.total;
        outcome.waited_seconds += record.timings.data;
        outcome.tokens += record.tokens as u64;
        outcome.padding += record.padding as u64;
        if let Some(&Evaluation { step, loss, accuracy, .. }) =
            evaluations.next_if(|one| one.step == record.step)
        {
            let Outcome { seconds, tokens, .. } = outcome;
            outcome.curve.push(Point { step, seconds, tokens, loss, accuracy });
        }
    }
    Ok(outcome)
}
