//! Applies the techniques of a [`Config`] to a model, in the one right order.
//!
//! ```text
//! load → freeze → adapters → loss head → MLP → activation plan → offload → precision and scaler → optimizer
//! ```
//!
//! Adapters come before everything that looks at projections, the loss head before anything wraps it, and offload last of
//! what edits the model, so that it moves what the others left. [`Recipe::new`] refuses what cannot be combined before a
//! weight is read. What a combination computes is tested for every pair (`tests/it/pairs.rs`).
//!
//! ```
//! use frugal::{Config, Recipe};
//! use models::{Llama, DecoderConfig};
//! use tch::{Device, Kind};
//! use training::batches::Synthetic;
//! use training::trainer::StopReason;
//!
//! let config: Config = r#"
//!     [adapter]
//!     r = 4
//!     [activations]
//!     plan = "recompute"
//!     [precision]
//!     compute = "bf16"
//! "#
//! .parse()?;
//! let model = Llama::new(&DecoderConfig::llama(64, 16, 40, 2, 4), (Kind::Float, Device::Cpu))?;
//! let prepared = Recipe::new(&config)?.apply(Box::new(model))?;
//! let (mut trainer, handles) = prepared.trainer(3)?;
//! let mut data = Synthetic {
//!     seed: 1, vocabulary: 64, rows: 2, length: 16, noise: 1, batches: None, device: Device::Cpu, position: 0,
//! };
//! assert_eq!(trainer.run(&mut data, None)?, StopReason::Completed);
//! assert!(handles.adapters.is_some());
//!
//! let refused: Config = "[optimizer]\nplace = \"host\"".parse()?;
//! let error = Recipe::new(&refused).unwrap_err().to_string();
//! assert!(error.contains("cannot be combined"), "{error}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod checks;
mod kept_layers;
mod new_rows;
mod options;
mod pairs;
mod prepared;
mod teacher;

use std::sync::Arc;

use amp::{Autocast, DynamicGradScaler, DynamicScalerConfig, StaticGradScaler};
use fused_ce::{Chunk, Gradients, LinearCrossEntropy};
use lora::LoraConfig;
use models::hugging_face::Folder;
use models::init::Init;
use models::module::{self, Block, LanguageModel, Module, ModuleMapper};
use models::{DecoderConfig, Llama};
use offload::{Offload, StreamedExperts};
use runtime::collectives::Group;
use sharding::{Mesh, Shards};
use swiglu_ckpt::CheckpointLevel;
use tch::{Device, Kind};
use training::activations::{self, Activations, LayerPlan};
use training::layer_source::{LayerSource, set_placeholder};
use training::scaler::{GradScaler, NoScaler};

pub(crate) use checks::stages;
pub use new_rows::{NewRow, NewRows};
pub use prepared::{ActivationChoice, Handles, Prepared};
pub(crate) use teacher::TEACHER_RING;
pub use teacher::{Role, Teacher, check_tokens};

use crate::config::{
    ActivationPlan, Compute, Config, FrozenPlace, LossConfig, LossHeadKind, OffloadTier, ScalerConfig,
    ZeroStage,
};
use crate::error::{Error, Result};

/// A configuration whose techniques go together.
#[derive(Debug, Clone)]
pub struct Recipe {
    config: Config,
    level: Option<CheckpointLevel>,
    ranks: Option<Mesh>,
    new_rows: Option<NewRows>,
}

impl Recipe {
    /// Checks every value, and every technique against every other.
    ///
    /// # Errors
    /// [`Error::Value`] for a value outside its range, [`Error::Conflict`] for two
    /// techniques that cannot be combined; an adapter that cannot be.
    pub fn new(config: &Config) -> Result<Self> {
        checks::values(config)?;
        pairs::check(config)?;
        let level = config.mlp.level.as_deref().map(str::parse).transpose()?;
        Ok(Self { config: config.clone(), level, ranks: None, new_rows: None })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Makes it the recipe of a training that adds tokens, whose rows get their first values when the model is opened. The model has these
    /// rows already ([`Folder::with_vocabulary`]).
    #[must_use]
    pub fn with_new_rows(self, rows: NewRows) -> Self {
        Self { new_rows: Some(rows), ..self }
    }

    /// Makes it the recipe of one of several ranks, among which ZeRO stage 3 divides the layers. A stage that is open is the first that the
    /// techniques allow.
    ///
    /// # Errors
    /// Errors of [`Recipe::check_ranks`]; another number of replicas, or of ranks that divide a row, than the configuration's.
    pub fn over(mut self, ranks: impl Into<Mesh>) -> Result<Self> {
        let mesh = ranks.into();
        let stages = checks::stages(&self.config, mesh.world().size(), mesh.device())?;
        if self.config.optimizer.zero_stage == ZeroStage::Auto {
            self.config.optimizer.zero_stage = stages.first().copied().unwrap_or(ZeroStage::One);
        }
        if mesh.replicas() != self.config.optimizer.replicas {
            let (key, found) = ("optimizer.replicas", self.config.optimizer.replicas.to_string());
            return Err(Error::Value { key, found, expected: "the replicas of the given mesh" });
        }
        let (parts, given) =
            (self.config.training.sequence_parallel_size, mesh.sequence().map_or(1, Group::size));
        if parts != given {
            let (key, found) = ("training.sequence_parallel_size", parts.to_string());
            return Err(Error::Value {
                key,
                found,
                expected: "the ranks that divide a row of the given mesh",
            });
        }
        self.ranks = Some(mesh);
        Ok(self)
    }

    /// Checks the techniques against a training over several ranks.
    ///
    /// # Errors
    /// Techniques that cannot be combined with several ranks, or with the ZeRO stage; a device other than the CPU; fewer batches in a
    /// step than ranks.
    pub fn check_ranks(&self, ranks: usize) -> Result<()> {
        self.check_ranks_on(ranks, Device::Cpu)
    }

    /// As [`Recipe::check_ranks`], for ranks whose groups are for tensors on `device` ([`Mesh::over_devices`]). Training over ranks on GPUs
    /// is written and has never run on one.
    ///
    /// # Errors
    /// As [`Recipe::check_ranks`], but for the device.
    pub fn check_ranks_on(&self, ranks: usize, device: Device) -> Result<()> {
        checks::stages(&self.config, ranks, device).map(|_| ())
    }

    /// Checks the techniques against a model's folder, whose weights are not read.
    ///
    /// # Errors
    /// An adapter whose targets the model does not have; a resident layer that it does not have; as [`Recipe::new`] for
    /// the dtype of the files.
    pub fn check_folder(&self, folder: &Folder) -> Result<()> {
        checks::folder(&self.config, folder)
    }

    /// Opens a model and applies every technique. Each offloaded layer goes to its tier as it is read, so the model may be larger than
    /// the device's memory, and with the tier `file` larger than the host's. If ranks divide the layers, each rank reads one layer after
    /// the other and keeps its part, unless the layers are needed before: for an adapter with `reads_weights`, `mlp.level`, resident
    /// layers, or a frozen base that stays whole.
    ///
    /// # Errors
    /// Errors of [`Recipe::check_folder`], of [`Folder::load`] and of each technique.
    pub fn open(&self, folder: &Folder, device: Device) -> Result<Prepared> {
        self.check_folder(folder)?;
        if let Some(ranks) = &self.ranks {
            let config = checks::with_dtype_of(&self.config, folder);
            checks::stages(&config, ranks.world().size(), ranks.device())?;
        }
        let kind = self.config.model.dtype.map(crate::config::Dtype::kind);
        let shards = self.shards()?;
        if let Some(shards) = shards.clone().filter(|_| self.divides_before_values()) {
            return self.open_divided(folder, (kind, device), shards);
        }
        if let Some(experts) = &self.config.experts {
            if device != Device::Cpu {
                let (key, found) = ("training.device", runtime::device::flag(device));
                return Err(Error::Value {
                    key,
                    found,
                    expected: "`cpu`: experts are streamed on a CPU only",
                });
            }
            let (model, experts) = experts.options().open(folder, kind)?;
            return self.apply_to(
                Box::new(model),
                Opened { experts: Some(experts), ..Opened::default() },
                None,
            );
        }
        match self.config.offload.as_ref().filter(|_| shards.is_none()) {
            None => self.apply_to(Box::new(folder.load(kind, device)?), Opened::default(), shards),
            Some(offload) => {
                let layers = usize::try_from(folder.config().num_hidden_layers).unwrap_or(0);
                let options = offload::OffloadConfig {
                    keep: self.kept_layers(layers)?,
                    inputs_on_host: self.config.keeps_inputs_on_host(),
                    train_files: self.config.adapter.is_none(),
                    ..offload.options(device)
                };
                let (model, offload) = Offload::open(folder, kind, &options)?;
                self.apply_to(Box::new(model), Opened::offloaded(offload), None)
            }
        }
    }

    /// Opens a model whose layers have no values until they are divided, one after the other.
    fn open_divided(
        &self,
        folder: &Folder,
        (kind, device): (Option<Kind>, Device),
        shards: Shards,
    ) -> Result<Prepared> {
        let kind = kind.map_or_else(|| folder.kind(), Ok)?;
        let mut without_values = |_: usize, block: Box<dyn Block>| -> models::Result<Box<dyn Block>> {
            module::tensors(&*block).iter().try_for_each(|named| set_placeholder(named.tensor))?;
            Ok(block)
        };
        let model =
            Llama::assemble(folder.config(), Init::Uninitialised, (kind, device), &mut without_values)?;
        folder.load_filtered(&model, &|name| !name.starts_with("layers."))?;
        let files = Folder::open(folder.path())?;
        shards.read_values(move |name, target| Ok(files.load_tensor(name, target)?));
        let prepared = self.apply_to(Box::new(model), Opened::default(), Some(shards.clone()));
        shards.forget_values();
        prepared
    }

    /// Creates a model with initial weights and applies every technique. If ranks divide its layers, each is divided before the next is
    /// created.
    ///
    /// # Errors
    /// An invalid configuration; those of each technique.
    pub fn create(
        &self,
        model: &DecoderConfig,
        init: Init,
        (kind, device): (Kind, Device),
    ) -> Result<Prepared> {
        checks::sequence_parallel_model(&self.config, model)?;
        let trains_all = self.config.adapter.is_none() && self.config.model.freeze.is_none();
        let shards = if trains_all && self.config.mlp.level.is_none() { self.shards()? } else { None };
        let Some(shards) = shards else {
            let model = Llama::assemble(model, init, (kind, device), &mut |_, block| Ok(block))?;
            return self.apply(Box::new(model));
        };
        let layers = usize::try_from(model.num_hidden_layers).unwrap_or(0);
        let options = self.options_of_layers(device, &shards, self.kept_layers(layers)?);
        let (model, offload) = Offload::assemble(model, init, kind, &options)?;
        self.apply_to(Box::new(model), Opened::offloaded(offload), Some(shards))
    }

    /// Applies every technique to a model.
    ///
    /// # Errors
    /// Errors of each technique.
    pub fn apply(&self, model: Box<dyn LanguageModel>) -> Result<Prepared> {
        self.apply_to(model, Opened::default(), self.shards()?)
    }

    fn apply_to(
        &self,
        mut model: Box<dyn LanguageModel>,
        opened: Opened,
        shards: Option<Shards>,
    ) -> Result<Prepared> {
        let config = &self.config;
        let Opened { mut offload, mut experts } = opened;
        let device =
            module::tensors(model.as_ref()).first().map_or(Device::Cpu, |named| named.tensor.device());
        let of_quantized = match &self.new_rows {
            Some(rows) => rows.write(model.as_mut())?,
            None => Vec::new(),
        };
        if let Some(pattern) = &config.model.freeze {
            module::freeze(model.as_ref(), pattern, true)?;
        }
        let adapters = match &config.adapter {
            None => None,
            Some(adapter) => {
                let adapters =
                    LoraConfig { seed: config.training.seed, ..adapter.clone() }.install(model.as_mut())?;
                if let (Some(rows), Some(tokens)) = (&self.new_rows, &adapter.trainable_token_indices) {
                    rows.fill(&of_quantized, &adapters, tokens.first())?;
                }
                model = Box::new(adapters.wrap(model)?);
                Some(adapters)
            }
        };
        install_loss_head(model.as_mut(), &config.loss)?;
        if let Some(level) = self.level {
            level.install(model.as_mut())?;
        }
        let activations = self.install_activations(model.as_mut())?;
        if offload.is_none() && (shards.is_some() || config.offload.is_some()) {
            let keep = self.kept_layers(count_blocks(model.as_mut())?)?;
            let options = match &shards {
                Some(shards) => Some(self.options_of_layers(device, shards, keep)),
                None => {
                    let inputs_on_host = config.keeps_inputs_on_host();
                    config.offload.as_ref().map(|own| offload::OffloadConfig {
                        keep,
                        inputs_on_host,
                        ..own.options(device)
                    })
                }
            };
            let apply = |options: offload::OffloadConfig| options.install(model.as_mut());
            offload = options.map(apply).transpose()?;
        }
        if let (Some(streamed), None) = (&config.experts, &experts) {
            experts = Some(streamed.options().install(model.as_mut())?);
        }
        let precision = match config.precision.compute {
            Compute::Fp32 => None,
            Compute::Bf16 => Some(Autocast::new(Kind::BFloat16)?.policy()),
            Compute::Fp16 => Some(Autocast::new(Kind::Half)?.policy()),
            Compute::Fp8 => Some(Autocast::fp8().policy()),
        };
        let handles = Handles { adapters, activations, offload, experts, shards, teacher_offload: None };
        let (config, ranks) = (config.clone(), self.ranks.clone());
        Ok(Prepared { config, ranks, model, handles, precision, scaler: self.scaler()?, teacher: None })
    }

    fn divides_layers(&self) -> bool {
        self.ranks.is_some() && self.config.optimizer.zero_stage == ZeroStage::Three
    }

    /// Shards without a layer, if ranks divide the layers: in files with the tier `file`.
    fn shards(&self) -> Result<Option<Shards>> {
        let Some(ranks) = self.ranks.as_ref().filter(|_| self.divides_layers()) else { return Ok(None) };
        let (frozen, ranks) = (self.config.optimizer.frozen_weights.into(), ranks.clone());
        Ok(Some(match self.config.offload.as_ref().filter(|offload| offload.tier == OffloadTier::File) {
            Some(offload) => {
                let folder = offload.folder.clone().unwrap_or_else(std::env::temp_dir);
                Shards::in_files(ranks, frozen, &folder)?
            }
            None => Shards::new(ranks, frozen)?,
        }))
    }

    /// Method of loading layers that ranks divide.
    fn options_of_layers(&self, device: Device, shards: &Shards, keep: Vec<usize>) -> offload::OffloadConfig {
        let offload = self.config.offload.clone().unwrap_or_default();
        let source: Arc<dyn LayerSource> = Arc::new(shards.clone());
        offload::OffloadConfig { source: Some(source), keep, ..offload.options(device) }
    }

    /// Offloaded or divided layers that keep their activations.
    fn kept_layers(&self, layers: usize) -> Result<Vec<usize>> {
        self.config.kept_layers(layers).map(Option::unwrap_or_default)
    }

    /// Whether nothing reads the values of layers before they are divided, and every one of them is.
    fn divides_before_values(&self) -> bool {
        let config = &self.config;
        let adapter = config.adapter.as_ref();
        let resident = config.offload.as_ref().is_some_and(|offload| !offload.resident.is_empty());
        let is_whole = config.optimizer.frozen_weights == FrozenPlace::Whole
            && (adapter.is_some() || config.model.freeze.is_some());
        let read = adapter.is_some_and(|adapter| adapter.reads_weights().unwrap_or(true));
        !resident && !is_whole && !read && config.mlp.level.is_none()
    }

    /// Puts the layers behind switches, unless all keep their activations to the end. Of offloaded layers, `offload` has the plan.
    fn install_activations(&self, model: &mut dyn Module) -> Result<Option<Activations>> {
        let activations = &self.config.activations;
        let offloaded = self.config.offload.is_some() || self.divides_layers();
        if activations.plan == ActivationPlan::Keep || offloaded {
            return Ok(None);
        }
        let layers = count_blocks(model)?;
        let plan = match activations.plan {
            // What the plan will be is decided later: `Prepared::plan_activations`, or by who has predicted it.
            ActivationPlan::Auto | ActivationPlan::Keep | ActivationPlan::Plan => {
                vec![LayerPlan::KeepAll; layers]
            }
            ActivationPlan::Recompute => {
                activations::every_kth(layers, 1, activations.recompute.layer_plan())?
            }
            ActivationPlan::EveryK => {
                activations::every_kth(layers, activations.every, activations.recompute.layer_plan())?
            }
        };
        Ok(Some(Activations::install(model, &plan)?))
    }

    fn scaler(&self) -> Result<Box<dyn GradScaler>> {
        if self.config.precision.compute != Compute::Fp16 {
            return Ok(Box::new(NoScaler));
        }
        Ok(match self.config.precision.scaler.unwrap_or_default() {
            ScalerConfig::Static { scale } => Box::new(StaticGradScaler::new(scale)?),
            ScalerConfig::Dynamic { init_scale, growth_factor, backoff_factor, growth_interval } => {
                let options = DynamicScalerConfig {
                    init_scale,
                    growth_factor,
                    backoff_factor,
                    growth_interval,
                    ..DynamicScalerConfig::default()
                };
                Box::new(DynamicGradScaler::new(options)?)
            }
        })
    }
}

/// What was moved out of memory while the model was read.
#[derive(Default)]
struct Opened {
    offload: Option<Offload>,
    experts: Option<StreamedExperts>,
}

impl Opened {
    fn offloaded(offload: Offload) -> Self {
        Self { offload: Some(offload), experts: None }
    }
}

fn install_loss_head(model: &mut dyn Module, loss: &LossConfig) -> Result<()> {
    if loss.head == LossHeadKind::Plain {
        return Ok(());
    }
    let chunk = match (loss.chunk_tokens, loss.chunk_bytes) {
        (Some(tokens), _) => Some(Chunk::Tokens(tokens)),
        (None, bytes) => bytes.map(|bytes| Chunk::Budget(bytes.0)),
    };
    let gradients = if loss.gradients_in_backward { Gradients::Backward } else { Gradients::Forward };
    let rounded = LinearCrossEntropy { round_logits_gradient: true, ..LinearCrossEntropy::default() };
    match (LinearCrossEntropy { chunk, gradients, ..rounded }).install(model) {
        // A head that is more than a projection, because it is adapted itself.
        Err(runtime::Error::Unsupported(_)) if loss.head == LossHeadKind::Auto => Ok(()),
        other => Ok(other?),
    }
}

fn count_blocks(model: &mut dyn Module) -> Result<usize> {
    struct Count(usize);
    impl ModuleMapper for Count {
        fn block(&mut self, _: &str, _: &mut Box<dyn Block>) -> models::Result<()> {
            self.0 += 1;
            Ok(())
        }
    }
    let mut count = Count(0);
    module::map_modules(model, &mut count)?;
    Ok(count.0)
}
