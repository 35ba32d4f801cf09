//! The training loop.
//!
//! One step: fetch the micro-batches ([`accumulation`](crate::accumulation)); start the [`Optimizer`]'s step with the
//! learning-rate factor ([`LrSchedule`]); for each micro-batch, run forward, and backward from its share of the loss; let the
//! optimizer unscale ([`GradScaler`]) and clip ([`clip`](crate::clip)) the gradients, and step; clear the gradients. Between steps: read
//! losses, evaluate, save, stop.
//!
//! The loop waits for the device only to read the gradient norm or overflow flag, if needed (in one copy; never with a
//! [`DeviceGradScaler`](crate::scaler::DeviceGradScaler), nor on CUDA without a scaler), and the losses, several steps at a time. On CUDA a
//! graph repeats the steps ([`captured`]). A resumed training computes the same bits as one that was never stopped (on a GPU with
//! deterministic attention: [`kernels::attention::backend`]): parameters, optimizer, scaler, data position and random generators are
//! restored.

mod best;
pub mod captured;
mod description;
mod failed_save;
mod failed_step;
mod figures;
mod frozen;
mod options;
mod passes;
pub(crate) mod ranks;
mod replan;
mod retry;
mod saving;
mod trouble;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use models::module::LanguageModel;
use runtime::precision;
use runtime::profile::range;
use runtime::random::{RandomState, StepSeeds};
use tch::{Device, Kind, Tensor};

use crate::accumulation::MicroBatches;
use crate::batches::Batches;
use crate::checkpoint::Checkpoints;
use crate::distillation::Distillation;
use crate::divergence::DivergenceMonitor;
use crate::error::Result;
use crate::observer::{Observer, StepRecord, Timings};
use crate::optimizer::{Optimizer, StepDecision, StepSettings};
use crate::policy::Policy;
use crate::preference::Preference;
use crate::scaler::{GradScaler, NoScaler};
use crate::schedule::LrSchedule;
use crate::split_mix::split_mix;
pub use best::{Best, BestWeights};
use captured::CapturedSteps;
use failed_step::BeforeStep;
use figures::Pending;
use frozen::Fingerprint;
pub use frozen::Frozen;
pub use options::{Capture, FailedCheckpoint, TrainerConfig};
pub use replan::{CheaperPlan, CheaperPlans};
use retry::Attempts;
pub use retry::Overflow;
use saving::SaveReason;
pub use trouble::StepFigures;
use trouble::Trouble;

/// Why a training ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// All steps are completed.
    Completed,
    /// The data ended first.
    OutOfData,
    /// [`Trainer::stop`] was set.
    Interrupted,
    /// [`TrainerConfig::patience`] evaluations in a row were not better than the best.
    StoppedEarly,
}

/// A step up to its update.
enum StepOutcome {
    /// The sums of the losses, and whether to skip it.
    Decided(Tensor, StepDecision),
    /// A graph has run the update as well.
    Done(DoneStep),
}

/// A step after its update.
struct DoneStep {
    /// [`Pending::sums`] and [`Pending::parts`].
    sums: Tensor,
    parts: usize,
    /// As far as the host knows.
    gradient_norm: Option<f64>,
    skipped: bool,
}

/// A training. Its parts are public fields, to be set as needed.
pub struct Trainer {
    /// The model.
    pub model: Box<dyn LanguageModel>,
    /// The optimizer.
    pub optimizer: Box<dyn Optimizer>,
    /// The learning-rate schedule.
    pub schedule: LrSchedule,
    /// The loss scaler.
    pub scaler: Box<dyn GradScaler>,
    /// Mixed precision of the forward in training and evaluation; `None` for the thread's current policy, if any.
    pub precision: Option<Arc<dyn precision::Policy>>,
    /// The folder of checkpoints.
    pub checkpoints: Option<Checkpoints>,
    /// The observers.
    pub observers: Vec<Box<dyn Observer>>,
    /// Keeps the weights of the best evaluation.
    pub best: Option<Box<dyn BestWeights>>,
    /// What is learned from pairs of completions; `None` to learn each next token.
    pub preference: Option<Preference>,
    /// A teacher that is learned from beside each next token; `None` without.
    pub distillation: Option<Distillation>,
    /// What is learned from rewards of the model's own answers; the data are then a source of prompts.
    pub policy: Option<Policy>,
    /// Activation plans to change to when memory is short.
    pub cheaper_plans: Option<CheaperPlans>,
    /// A reason of the program's why no graph can repeat the steps, such as weights that are moved between memories.
    pub not_captured: Option<String>,
    /// Set from outside to end the training after the current step, with a checkpoint.
    pub stop: Arc<AtomicBool>,
    /// The configuration. May be changed between runs.
    pub options: TrainerConfig,
    step: u64,
    saved: Option<u64>,
    captured: CapturedSteps,
    watch: DivergenceMonitor,
    trouble: Trouble,
    best_so_far: Option<Best>,
    pending: Vec<Pending>,
    last: Instant,
    /// When a checkpoint was last due by [`TrainerConfig::checkpoint_interval`].
    saved_at: Instant,
    /// Fingerprint of frozen parameters that checkpoints leave out, once computed.
    fingerprint: Fingerprint,
    /// The step whose update failed halfway.
    interrupted: Option<u64>,
    /// Whether an observer has failed since [`Trainer::run`] was called.
    observer_failed: bool,
}

impl Trainer {
    /// Creates a training at a constant learning rate, without a scaler, checkpoints or observers.
    ///
    /// # Errors
    /// An option outside its range.
    pub fn new(
        model: Box<dyn LanguageModel>,
        optimizer: Box<dyn Optimizer>,
        options: TrainerConfig,
    ) -> Result<Self> {
        options.check()?;
        Ok(Self {
            model,
            optimizer,
            schedule: LrSchedule::default(),
            scaler: Box::new(NoScaler),
            precision: None,
            checkpoints: None,
            observers: Vec::new(),
            best: None,
            preference: None,
            distillation: None,
            policy: None,
            cheaper_plans: None,
            not_captured: None,
            stop: Arc::default(),
            options,
            step: 0,
            saved: None,
            captured: CapturedSteps::default(),
            watch: DivergenceMonitor::default(),
            trouble: Trouble::default(),
            best_so_far: None,
            pending: Vec::new(),
            last: Instant::now(),
            saved_at: Instant::now(),
            fingerprint: Fingerprint::default(),
            interrupted: None,
            observer_failed: false,
        })
    }

    /// Returns the number of completed steps.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the step of the last checkpoint that this training wrote or resumed from. Less than [`Trainer::step`] after
    /// [`Trainer::run`] if the last one could not be written.
    pub fn saved(&self) -> Option<u64> {
        self.saved
    }

    /// Trains until all steps are done, the data ends, evaluations do not get better, or [`Trainer::stop`] is set; then saves. Each evaluation reads
    /// `validation` from its position to its end, and restores the position.
    ///
    /// A step that fails before the optimizer updates weights, such as for want of memory, leaves everything as it was before the step;
    /// another call computes it again. After an observer has failed, a training in one process saves its steps all the same.
    ///
    /// # Errors
    /// [`Error::Diverged`](crate::Error::Diverged); [`Error::NonFiniteWeight`](crate::Error::NonFiniteWeight);
    /// [`Error::Interrupted`](crate::Error::Interrupted) after a step that failed halfway through its
    /// update; a checkpoint that cannot be written; those of data, model and observers.
    pub fn run(
        &mut self,
        train: &mut dyn Batches,
        validation: Option<&mut dyn Batches>,
    ) -> Result<StopReason> {
        self.observer_failed = false;
        let ended = self.advance(self.options.steps, train, validation);
        // The steps are done all the same. Other ranks do not know of the failure, and would not take part in the checkpoint.
        if ended.is_ok() || self.observer_failed && self.optimizer.ranks().is_none() {
            let saved = self.save(train, SaveReason::End);
            return ended.and_then(|ended| saved.map(|()| ended));
        }
        ended
    }

    /// Trains until step `until`, like [`Trainer::run`], without saving at the end.
    ///
    /// # Errors
    /// Errors of [`Trainer::run`].
    pub fn advance(
        &mut self,
        until: u64,
        train: &mut dyn Batches,
        mut validation: Option<&mut dyn Batches>,
    ) -> Result<StopReason> {
        self.schedule.check()?;
        self.optimizer.check(self.scaler.as_mut())?;
        self.policy.as_ref().map_or(Ok(()), |policy| policy.check_steps(until, &self.options))?;
        self.last = Instant::now();
        let devices = self.devices();
        self.prepare_capture(&devices)?;
        let ended = loop {
            if self.step >= until {
                break StopReason::Completed;
            }
            // Answers that are learned from several times are not saved: between their updates a training does not end.
            let is_between =
                |trainer: &Self| trainer.policy.as_ref().is_some_and(|own| own.is_between(trainer.step));
            let best = self.best_so_far.filter(|_| !is_between(self));
            if best.is_some_and(|best| best.exhausts(self.options.patience)) {
                break StopReason::StoppedEarly;
            }
            let requests = self.requests()?;
            if requests.stop && !is_between(self) {
                break StopReason::Interrupted;
            }
            if !self.train_step(train, &devices)? {
                break StopReason::OutOfData;
            }
            let due = |every: Option<u64>| every.is_some_and(|every| self.step.is_multiple_of(every));
            let evaluate = due(self.options.evaluate_every);
            let save =
                due(self.options.checkpoint_every) || requests.save && self.step < until && !is_between(self);
            if due(Some(self.options.log_every)) || evaluate || save {
                self.read_losses()?;
            }
            if let Some(validation) = validation.as_deref_mut().filter(|_| evaluate) {
                self.evaluate(validation)?;
            }
            if save {
                let began = Instant::now();
                self.save(train, SaveReason::Periodic)?;
                self.saved_at = Instant::now();
                self.last += began.elapsed();
            }
        };
        self.finish_updates()?;
        self.read_losses()?;
        Ok(ended)
    }

    /// Sends the observers a line that the user asked for.
    ///
    /// # Errors
    /// Errors of the observers.
    pub fn note(&mut self, text: &str) -> Result<()> {
        self.tell(|observer| observer.on_note(text))
    }

    /// Sends the observers a warning.
    ///
    /// # Errors
    /// Errors of the observers.
    pub fn warn(&mut self, warning: &str) -> Result<()> {
        self.tell(|observer| observer.on_warning(warning))
    }

    /// Runs one step, or puts back what it changed; returns false at the end of the data.
    fn train_step(&mut self, train: &mut dyn Batches, devices: &[Device]) -> Result<bool> {
        let _step = range("step");
        self.refuse_interrupted()?;
        let before = BeforeStep::of(train, self.scaler.as_mut(), devices)?;
        self.try_step(train).map_err(|error| self.undo_step(error, &before, train))
    }

    fn try_step(&mut self, train: &mut dyn Batches) -> Result<bool> {
        let mut timings = Timings::default();
        let fetched = timed("data", &mut timings.data, || self.fetched(train))?;
        let Some(micro) = fetched else { return Ok(false) };
        let done = self.step_over(&micro, timings);
        if let Some(policy) = &mut self.policy {
            policy.hold(micro);
        }
        done.map(|()| true)
    }

    fn step_over(&mut self, micro: &MicroBatches, mut timings: Timings) -> Result<()> {
        let device = micro.batches[0].tokens.device();
        // For repetitions with these batches.
        let random = &RandomState::capture(device)?;
        let seed = split_mix(random.digest(), self.step);
        let mut attempts = self.attempts()?;
        self.fit_into_memory(device)?;
        let settings = StepSettings {
            micro_batches: micro.batches.len() as u64,
            factor: self.schedule.factor(self.step),
            clip: self.options.clip,
            non_finite: self.options.non_finite,
            on_device: self.captured.is_on(),
        };
        let (done, scale) = loop {
            self.optimizer.begin(settings)?;
            // The device's decision is added to the record when it is read.
            let scale = if self.scaler.device_scaler().is_some() { f64::NAN } else { self.scaler.current() };
            let computed = match self.captured.is_on() {
                true => self.captured_step(micro, (device, seed), random, &mut timings),
                false => self.compute_seeded(micro, (device, seed), &mut timings),
            };
            let (sums, decision) = match computed {
                Ok(StepOutcome::Decided(sums, decision)) => (sums, decision),
                Ok(StepOutcome::Done(done)) => break (done, scale),
                Err(error) => {
                    self.repeat_with_less(error, device, random)?;
                    continue;
                }
            };
            if !self.try_again(attempts.as_mut(), &decision, scale, random)? {
                break (self.update(sums, decision, &mut timings)?, scale);
            }
        };
        timings.total = self.last.elapsed().as_secs_f64();
        self.last = Instant::now();
        self.step += 1;
        let &MicroBatches { tokens, padding, targets, .. } = micro;
        let learning_rate = self.optimizer.learning_rates().first().copied().unwrap_or(0.0);
        let (step, loss, accuracy) = (self.step, f64::NAN, None);
        let DoneStep { sums, parts, gradient_norm, skipped } = done;
        let record = StepRecord {
            step,
            loss,
            accuracy,
            rewards: None,
            policy: None,
            distilled: None,
            reference_point: None,
            router_aux_loss: None,
            learning_rate,
            gradient_norm,
            skipped,
            retries: Attempts::made(attempts.as_ref()),
            scale,
            tokens,
            padding,
            targets,
            timings,
        };
        let rewarded = micro.chosen_and_rejected();
        let rollout = micro.rollout.as_ref().map(|rollout| (rollout.figures, rollout.learned));
        let (denominator, predictions) = (micro.denominator(), micro.predictions());
        self.pending.push(Pending { record, denominator, predictions, rewarded, rollout, sums, parts });
        Ok(())
    }

    /// [`Trainer::compute`] with the seeds of a step, which the host knows.
    fn compute_seeded(
        &mut self,
        micro: &MicroBatches,
        (device, seed): (Device, u64),
        timings: &mut Timings,
    ) -> Result<StepOutcome> {
        let _seeds = StepSeeds::enter(seed, None);
        self.compute(micro, &micro.denominator_on(device)?, timings)
    }

    /// Computes the gradients of a step, and decides whether to skip it.
    fn compute(
        &mut self,
        micro: &MicroBatches,
        denominator: &Tensor,
        timings: &mut Timings,
    ) -> Result<StepOutcome> {
        let (sums, point) = self.gradients(micro, denominator, timings)?;
        let started = Instant::now();
        let sums = Tensor::f_stack(&sums, 0)?;
        let mut sums = sums.f_sum_dim_intlist([0].as_slice(), false, Kind::Double)?;
        if let Some(point) = point {
            sums = Tensor::f_cat(&[sums, point.f_to_kind(Kind::Double)?.f_reshape([1])?], 0)?;
        }
        self.optimizer.watch_loss(&sums.f_narrow(0, 0, 1)?);
        let decision = self.optimizer.unscale_and_clip(self.scaler.as_mut())?;
        timings.optimizer += started.elapsed().as_secs_f64();
        Ok(StepOutcome::Decided(sums, decision))
    }

    /// Updates the weights, and clears the gradients.
    fn update(
        &mut self,
        mut sums: Tensor,
        decision: StepDecision,
        timings: &mut Timings,
    ) -> Result<DoneStep> {
        let started = Instant::now();
        // The last allocations of the step, before anything is updated.
        let parts = sums.numel();
        if let StepDecision::Device { figures, .. } = &decision {
            sums = Tensor::f_cat(&[&sums, &figures.f_to_device(sums.device())?], 0)?;
        }
        {
            let _optimizer = range("optimizer");
            self.optimizer.take_step(&decision)?;
            self.optimizer.zero_grad(self.options.zero_grad)?;
        }
        timings.optimizer += started.elapsed().as_secs_f64();
        let (gradient_norm, skipped) = match decision {
            StepDecision::Host { norm, skip, .. } => (norm, skip),
            StepDecision::Device { .. } => (None, false),
        };
        Ok(DoneStep { sums, parts, gradient_norm, skipped })
    }

    /// Calls every observer, also after one that fails. Returns the first failure.
    fn tell(&mut self, mut what: impl FnMut(&mut dyn Observer) -> Result<()>) -> Result<()> {
        let mut result = Ok(());
        for observer in &mut self.observers {
            result = result.and(what(observer.as_mut()));
        }
        self.observer_failed |= result.is_err();
        result
    }
}

/// Runs a part of a step in a named range, and adds its time.
fn timed<T>(name: &str, seconds: &mut f64, part: impl FnOnce() -> Result<T>) -> Result<T> {
    let _range = range(name);
    let start = Instant::now();
    let result = part();
    *seconds += start.elapsed().as_secs_f64();
    result
}
