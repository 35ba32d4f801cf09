//! A model with every technique applied, and the trainer over it.

use std::fmt;
use std::sync::Arc;

use dataloading::Batch;
use lora::Adapters;
use models::module::{self, Context, Input, LanguageModel};
use offload::{HostAdamW, HostAdamWConfig, Offload, StreamedExperts};
use runtime::memory;
use runtime::precision::{self, Policy};
use sharding::{Mesh, ShardedOptimizer, Shards, Stage};
use tch::{Kind, Tensor};
use training::Trainer;
use training::activations::{Activations, LayerPlan, StepPredictor};
use training::clip::NonFinite;
use training::distillation::Distillation;
use training::optimizer::{AdamW, DeviceOptimizer, Optimizer, OptimizerInBackward};
use training::preference::{Preference, Switch};
use training::scaler::GradScaler;
use training::schedule::LrSchedule;
use training::trainer::{Capture, FailedCheckpoint, Frozen, TrainerConfig};

use crate::config::{ActivationPlan, Bytes, CaptureMode, Config, OptimizerPlace, ZeroStage};
use crate::error::{Error, Result};
use crate::planning::Budget;
use crate::planning::captured::{EXPERTS, OFFLOADED_LAYERS, PREFERENCES, TEACHER, offload_refusal};
use crate::recipe::{Recipe, Teacher};

/// Handles on the techniques within a model, for saving adapters, changing plans, and reading counters.
#[derive(Debug, Default)]
pub struct Handles {
    /// The adapters.
    pub adapters: Option<Adapters>,
    /// Activations that the layers keep.
    pub activations: Option<Activations>,
    /// The offloaded layers.
    pub offload: Option<Offload>,
    /// The experts that are streamed.
    pub experts: Option<StreamedExperts>,
    /// This rank's shards of the layers.
    pub shards: Option<Shards>,
    /// The offloaded layers of a teacher.
    pub teacher_offload: Option<Offload>,
}

/// A model with every technique applied. See [`Recipe`](super::Recipe).
pub struct Prepared {
    pub(super) config: Config,
    pub(super) ranks: Option<Mesh>,
    /// The model.
    pub model: Box<dyn LanguageModel>,
    /// Handles on the techniques.
    pub handles: Handles,
    /// The mixed precision of its passes.
    pub precision: Option<Arc<dyn Policy>>,
    /// The loss scaler.
    pub scaler: Box<dyn GradScaler>,
    /// The teacher of a distillation.
    pub(super) teacher: Option<Teacher>,
}

/// The activation plan that was chosen under a budget.
#[derive(Debug, Clone, PartialEq)]
pub struct ActivationChoice {
    /// Plan of each layer.
    pub layers: Vec<LayerPlan>,
    /// Predicted bytes of a step on the device at its peak, weights, gradients and optimizer state included.
    pub peak_bytes: u64,
    /// Predicted seconds of a step's forward and backward.
    pub seconds: f64,
}

impl Prepared {
    /// Chooses the activation plan of least recomputation that keeps a step under the budget, if the configuration asks for
    /// one: measures a layer on `batch`, which should be the largest. Removes gradients.
    ///
    /// # Errors
    /// No plan fits: the error names the least budget that does.
    pub fn plan_activations(&mut self, batch: &Batch) -> Result<Option<ActivationChoice>> {
        let configured = &self.config.activations;
        let (Some(activations), ActivationPlan::Plan) = (&self.handles.activations, configured.plan) else {
            return Ok(None);
        };
        let device = batch.tokens.device();
        let budget = match (configured.budget, self.config.training.budget) {
            (Some(budget), _) => budget,
            // Tensors may take what the program itself leaves of it.
            (None, Some(budget)) => {
                let budget = Budget::new(budget.0, device)?;
                Bytes(budget.live + budget.free()?)
            }
            (None, None) => return Ok(None),
        };
        let documents = training::accumulation::documents(batch)?;
        let context = Context { training: true, documents: documents.as_ref(), ..Context::default() };
        let positions = batch.packing.as_ref().map(|packing| &packing.positions);
        let input = Input { tokens: &batch.tokens, positions, context };
        let random = runtime::random::RandomState::capture(device)?;
        let _precision = self.precision.clone().map(|policy| precision::enter(Some(policy)));
        let forecast = StepPredictor::measure(self.model.as_mut(), activations, &input, &batch.labels, 1)?;
        random.restore()?;
        // Between steps: tensors that are alive now, and state and gradients, which do not exist yet.
        let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        let optimizer = &self.config.optimizer;
        let beside = |(name, tensor): &(String, &Tensor)| {
            // Kept in fp32, except for fp64.
            let wide = if tensor.kind() == Kind::Double { 2 } else { 1 };
            let is_half = matches!(tensor.kind(), Kind::BFloat16 | Kind::Half);
            let copies = u64::from(is_half && optimizer.master_weights.keeps_copies());
            let state = optimizer.rule.state_bytes(name, &tensor.size());
            bytes(tensor) + wide * state + copies * 4 * tensor.numel() as u64
        };
        let trained: u64 = module::trainable(self.model.as_ref()).iter().map(beside).sum();
        let alive = memory::live_bytes(device)? + trained;
        let layers = activations.plan().len();
        let left = budget.0.checked_sub(alive).ok_or_else(|| Error::Value {
            key: "activations.budget",
            found: budget.to_string(),
            expected: "more than the weights, gradients and optimizer state take",
        })?;
        let plan = forecast.least_recomputation(layers, left)?;
        activations.change(&plan.layers)?;
        let step = forecast.step(&plan.layers)?;
        Ok(Some(ActivationChoice {
            layers: plan.layers,
            peak_bytes: alive + step.peak_bytes,
            seconds: step.seconds,
        }))
    }

    /// Gives it the teacher of a distillation.
    #[must_use]
    pub fn with_teacher(self, teacher: Teacher) -> Self {
        Self { teacher: Some(teacher), ..self }
    }

    /// Returns a trainer over the model's trainable parameters for `steps` steps, and the handles on the techniques. Checkpoints,
    /// observers and the stop flag are the caller's to set. The ranks of [`Recipe::over`](super::Recipe::over) divide the batches of a
    /// step among them.
    ///
    /// # Errors
    /// Nothing to train; a schedule without steps; over ranks those of [`ShardedOptimizer::new`].
    pub fn trainer(self, steps: u64) -> Result<(Trainer, Handles)> {
        let Self { config, ranks, model, mut handles, precision, scaler, teacher } = self;
        let (own, training) = (&config.optimizer, &config.training);
        let schedule = schedule(&config, steps)?;
        let over_ranks = ranks.is_some();
        let parameters = module::trainable(model.as_ref());
        if parameters.is_empty() {
            return Err(Error::Value {
                key: "model.freeze",
                found: "every parameter".to_owned(),
                expected: "a parameter that requires a gradient; install an adapter, or freeze less",
            });
        }
        let frozen = if parameters.len() < module::parameters(model.as_ref()).len() {
            Frozen::LeftOut
        } else {
            Frozen::Saved
        };
        // The optimizer: over ranks, on the host beside offloaded layers, or on the device.
        let order = parameters.iter().map(|(name, _)| name.clone()).collect();
        let groups = own.rule.groups(parameters, own.lr, own.weight_decay);
        let stochastic_rounding = own.master_weights.rounding_seed(training.seed);
        let optimizer: Box<dyn Optimizer> = match (ranks, own.place, &handles.offload) {
            (Some(ranks), ..) => {
                let stage = match own.zero_stage {
                    ZeroStage::Auto | ZeroStage::One => Stage::One,
                    ZeroStage::Two => Stage::Two,
                    ZeroStage::Three => Stage::Three,
                };
                let options = sharding::ShardingConfig {
                    stage,
                    reduction: own.reduction.into(),
                    master_weights: own.master_weights.keeps_copies(),
                    stochastic_rounding,
                    order,
                    shards: handles.shards.clone(),
                    // The loss's own backward adds to a matrix that the embedding uses too.
                    one_addition: !config.loss.gradients_in_backward,
                    ..sharding::ShardingConfig::default()
                };
                Box::new(ShardedOptimizer::boxed(own.rule.rule(), groups, ranks, options)?)
            }
            (None, OptimizerPlace::Host, Some(offload)) => {
                let master_weights = own.master_weights.keeps_copies();
                let options =
                    HostAdamWConfig { master_weights, stochastic_rounding, ..HostAdamWConfig::default() };
                Box::new(HostAdamW::new(offload, groups, AdamW::default(), options)?)
            }
            _ => {
                let optimizer = DeviceOptimizer::boxed(own.rule.rule(), groups)?;
                let optimizer = match (own.master_weights.keeps_copies(), stochastic_rounding) {
                    (true, _) => optimizer.with_master_weights(),
                    (false, Some(seed)) => optimizer.with_stochastic_rounding(seed),
                    (false, None) => optimizer,
                };
                match own.in_backward {
                    true => Box::new(OptimizerInBackward::new(optimizer)?),
                    false => Box::new(optimizer),
                }
            }
        };
        let options = TrainerConfig {
            steps,
            accumulation: training.accumulation,
            rows: training.micro_batch_size.filter(|rows| *rows < training.batch),
            clip: (own.clip > 0.0).then_some(own.clip),
            embedding_noise: training.neftune_noise_alpha.unwrap_or(0.0),
            router_aux_loss: config.loss.router_aux_loss.unwrap_or(0.0),
            log_every: training.log_every,
            evaluate_every: training.evaluate_every,
            patience: training.patience,
            checkpoint_every: training.checkpoint_every.steps(),
            checkpoint_interval: training.checkpoint_every.time(),
            failed_checkpoint: match training.ignore_failed_checkpoints {
                true => FailedCheckpoint::Continue,
                false => FailedCheckpoint::Stop,
            },
            frozen,
            non_finite: match own.place {
                _ if own.in_backward => NonFinite::Fail,
                // Layers are updated within backward then, which would need memory for all gradients to skip a step.
                OptimizerPlace::Host if own.clip == 0.0 && !over_ranks => NonFinite::Fail,
                _ => NonFinite::Skip,
            },
            capture: match training.capture {
                CaptureMode::Auto => Capture::Auto,
                CaptureMode::Off => Capture::Off,
            },
            ..TrainerConfig::default()
        };
        let has_experts = !model.config()["num_local_experts"].is_null();
        let mut trainer = Trainer::new(model, optimizer, options)?;
        trainer.schedule = schedule;
        trainer.precision = precision;
        trainer.scaler = scaler;
        let offloads = handles.offload.is_some().then_some(OFFLOADED_LAYERS);
        if let Some(objective) = config.objective.preference()? {
            let is_known = config.objective.is_computed_before(config.adapter.is_some());
            let switch = handles.adapters.as_ref().filter(|_| !is_known).map(Adapters::switch);
            let switch = switch.map(|switch| -> Switch { Box::new(move || Ok(Box::new(switch.disable()?))) });
            trainer.preference = Some(Preference { objective, switch });
        }
        if let Some(learned) = config.objective.distillation()? {
            if config.objective.teacher_top_k.is_some() {
                trainer.distillation = Some(Distillation::from_files(learned)?);
            } else {
                let Some(teacher) = teacher else {
                    let found = config.objective.teacher.clone().unwrap_or_default();
                    let expected = "a teacher that is opened and given to `Prepared::with_teacher`";
                    return Err(Error::Value { key: "objective.teacher", found, expected });
                };
                handles.teacher_offload = teacher.offload;
                trainer.distillation = Some(Distillation::new(teacher.model, learned)?);
            }
        }
        let preferences = trainer.preference.is_some().then_some(PREFERENCES);
        let preferences = preferences.or(trainer.distillation.is_some().then_some(TEACHER));
        let refusal =
            offloads.or(offload_refusal(&config)).or(has_experts.then_some(EXPERTS)).or(preferences);
        trainer.not_captured = refusal.map(str::to_owned);
        Ok((trainer, handles))
    }
}

impl Recipe {
    /// Returns the learning-rate schedule of a training of `steps` steps. It needs no model.
    ///
    /// # Errors
    /// No step; a warm-up that leaves none for the decay.
    pub fn schedule(&self, steps: u64) -> Result<LrSchedule> {
        schedule(&self.config, steps)
    }
}

fn schedule(config: &Config, steps: u64) -> Result<LrSchedule> {
    if steps == 0 {
        let (key, expected) = ("training.steps", "1 step or epoch at least");
        return Err(Error::Value { key, found: "0".to_owned(), expected });
    }
    let optimizer = &config.optimizer;
    let schedule =
        LrSchedule { shape: optimizer.schedule, warmup: optimizer.warmup_steps(steps), steps, floor: 0.0 };
    if schedule.check().is_err() {
        let warmup = format!("{} of the training's {steps} steps", schedule.warmup);
        let expected = "fewer than all steps, since the learning rate decays after it, or `optimizer.schedule = \"constant\"`";
        return Err(Error::Value { key: "optimizer.warmup", found: warmup, expected });
    }
    Ok(schedule)
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared").field("handles", &self.handles).finish_non_exhaustive()
    }
}
