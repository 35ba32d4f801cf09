//! Everything that defines a training, as one value and one TOML file.
//!
//! A training writes its configuration as `config.toml` into its output folder, which is all that a resume needs. Each section
//! is one subject, and each key is optional: one that is left out has its default, which depends on `task` and `method` alone
//! ([`Config::defaults`]). A file is a fine-tuning with LoRA unless it has `method = "dora"`, `method = "full"` or `task = "train"`.
//! Bytes are whole numbers of bytes, or text with a unit (`"3GiB"`).
//!
//! ```
//! use frugal::Config;
//!
//! let config: Config = r#"
//!     [model]
//!     name = "Qwen/Qwen2.5-0.5B"
//!     [adapter]
//!     r = 16
//!     target_modules = ["q_proj", "v_proj"]
//!     [activations]
//!     plan = "recompute"
//!     [training]
//!     steps = 100
//! "#
//! .parse()?;
//! assert_eq!(config.adapter.as_ref().map(|adapter| (adapter.r, adapter.lora_dropout)), Some((16, 0.05)));
//! let full: Config = "method = \"full\"".parse()?;
//! assert_eq!((full.adapter, full.optimizer.lr), (None, 2e-5));
//!
//! let error = "[training]\nstep = 100".parse::<Config>().unwrap_err().to_string();
//! assert!(error.starts_with("line 2 (`step = 100`): unknown field `step`, expected one of `steps`"), "{error}");
//!
//! let config = config.with("optimizer.lr=1e-4")?;
//! assert_eq!(config.optimizer.lr, 1e-4);
//! let error = config.with("optimizer.rl=1e-4").unwrap_err().to_string();
//! assert!(error.ends_with("did you mean `lr`?"), "{error}");
//! # Ok::<(), frugal::Error>(())
//! ```

mod bytes;
mod checkpoint_every;
mod data;
mod defaults;
mod given;
mod master_weights;
mod method;
mod mixture;
mod nearest;
mod new_tokens;
mod objective;
mod optimizer;
pub mod origins;
mod rollout;
mod set;
mod techniques;
mod training;
mod written;
mod zero_stage;

use std::path::Path;
use std::str::FromStr;

use kernels::nf4::Scales;
use kernels::quantized::blocks;
use lora::LoraConfig;
use serde::{Deserialize, Serialize};
use tch::Kind;
use written::Written;

pub use bytes::Bytes;
pub use checkpoint_every::CheckpointEvery;
pub use data::{DataConfig, DataFormat, SYNTHETIC};
pub use given::{Given, current_name};
pub use master_weights::MasterWeights;
pub use method::Method;
pub use mixture::MixtureSource;
pub use nearest::nearest_name;
pub use new_tokens::{DescribedToken, NewToken, NewTokenInit};
pub use objective::{DivergenceKind, ObjectiveConfig, ObjectiveKind, ReferenceKind, TeacherPlace};
pub use optimizer::{FrozenPlace, OptimizerConfig, OptimizerPlace, OptimizerRule, ReductionOrder};
pub use rollout::{RewardSource, RolloutConfig};
pub use techniques::{
    ActivationPlan, ActivationsConfig, Compute, ExpertsConfig, LossConfig, LossHeadKind, MlpConfig,
    OffloadConfig, OffloadMethod, OffloadTier, PrecisionConfig, Recomputed, ScalerConfig,
};
pub use training::{CaptureMode, TrainingConfig};
pub use zero_stage::ZeroStage;

use crate::error::{Error, Result};

/// Name of the configuration within an output folder.
pub const CONFIG_FILE: &str = "config.toml";

/// A training. See the [module](self).
///
/// In files and as text it is what was [given](Given) over the [defaults](Config::defaults); `serde` reads what `serde` wrote.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct Config {
    /// Whether a model is fine-tuned or trained from scratch.
    pub task: Task,
    /// Model.
    pub model: ModelConfig,
    /// The training data.
    pub data: DataConfig,
    /// What is learned of them.
    pub objective: ObjectiveConfig,
    /// Answers that are sampled and graded, where rewards are learned.
    pub rollout: RolloutConfig,
    /// Low-rank adapters, under PEFT's names; absent for full fine-tuning, which a file says by `method = "full"`.
    pub adapter: Option<LoraConfig>,
    /// Activations that the MLPs keep for backward.
    pub mlp: MlpConfig,
    /// Computation of the loss.
    pub loss: LossConfig,
    /// Activations that the layers keep for backward.
    pub activations: ActivationsConfig,
    /// Weight offloading; absent to keep all weights on the device.
    pub offload: Option<OffloadConfig>,
    /// Streaming of the experts of a mixture; absent to keep them with their layers.
    pub experts: Option<ExpertsConfig>,
    /// Mixed precision.
    pub precision: PrecisionConfig,
    /// Optimizer.
    pub optimizer: OptimizerConfig,
    /// The loop.
    pub training: TrainingConfig,
}

/// Whether a model is fine-tuned or trained from scratch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// Fine-tunes an existing model.
    #[default]
    Finetune,
    /// Trains a model from scratch.
    Train,
}

/// The model, by name or by shape.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// A folder in Hugging Face's layout, a GGUF file, a name in Ollama's store (`ollama:NAME`), a name on the hub, or, for a training from
    /// scratch, a `config.json`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Branch, tag or commit on the hub.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Takes models from the hub's cache only, never from the network.
    pub offline: bool,
    /// Of a GGUF file that holds the embedding again as the output head, keeps both matrices.
    pub untied: bool,
    /// Dtype of the weights; absent for that of the files, and for float32 in a training from scratch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dtype: Option<Dtype>,
    /// Freezes the parameters whose whole name matches this regular expression, in full fine-tuning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub freeze: Option<String>,
    /// Tokens that a fine-tuning adds: with adapters their rows of the embedding and of the head are trained, and no other.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub new_tokens: Vec<NewToken>,
    /// First values of their rows.
    pub new_token_init: NewTokenInit,
    /// A vocabulary that grows is rounded up to a multiple of this number of rows; absent for one row for each token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pad_vocabulary_to: Option<i64>,
    /// The shape of a model that is trained from scratch, where `name` has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shape: Option<ShapeConfig>,
}

/// The shape of a small model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShapeConfig {
    /// Architecture.
    pub family: ShapeFamily,
    /// Width of the hidden states.
    pub width: i64,
    /// Attention heads.
    pub heads: i64,
    /// Layers; the GPT-2-like model has one.
    pub layers: i64,
    /// Probability that an activation is dropped.
    pub dropout: f64,
}

impl Default for ShapeConfig {
    fn default() -> Self {
        Self { family: ShapeFamily::default(), width: 64, heads: 4, layers: 2, dropout: 0.0 }
    }
}

/// An architecture to train from scratch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum ShapeFamily {
    /// One post-norm decoder layer.
    #[default]
    Gpt2Like,
    /// GPT-2: pre-norm, of any depth.
    Gpt2,
}

impl ShapeFamily {
    /// Returns its name in flags and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gpt2Like => "gpt2-like",
            Self::Gpt2 => "gpt2",
        }
    }
}

/// A dtype of weights, by PyTorch's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 32 bits.
    #[cfg_attr(feature = "clap", value(aliases = ["f32", "fp32"]))]
    Float32,
    /// 16 bits, with the exponent of float32.
    #[cfg_attr(feature = "clap", value(alias = "bf16"))]
    Bfloat16,
    /// 16 bits, IEEE half.
    #[cfg_attr(feature = "clap", value(aliases = ["f16", "fp16"]))]
    Float16,
    /// 64 bits.
    #[cfg_attr(feature = "clap", value(aliases = ["f64", "fp64"]))]
    Float64,
    /// 4 bits (nested scales) in the frozen projections of the blocks, for adapters and generation; bfloat16 elsewhere.
    Nf4,
    /// The blocks of a GGUF file, as they are, in all its matrices, which are frozen, for adapters and generation; bfloat16 elsewhere.
    Gguf,
}

impl Dtype {
    /// Returns the same in `tch`; for NF4 the dtype of its tensors ([`kernels::nf4`]), for a file's blocks [`blocks::KIND`].
    pub fn kind(self) -> Kind {
        match self {
            Self::Float32 => Kind::Float,
            Self::Bfloat16 => Kind::BFloat16,
            Self::Float16 => Kind::Half,
            Self::Float64 => Kind::Double,
            Self::Nf4 => Scales::Nested.kind(),
            Self::Gguf => blocks::KIND,
        }
    }
}

impl Config {
    /// Reads a TOML file.
    ///
    /// # Errors
    /// [`Error::File`] with the line: no such file, not TOML, a key that is unknown (those that are known are listed), a value
    /// of the wrong type.
    pub fn read(path: &Path) -> Result<Self> {
        let mut given = Given::default();
        given.file(path)?;
        given.config(given.task().unwrap_or_default())
    }

    /// Returns the TOML text that [`Config::read`] reads.
    ///
    /// # Errors
    /// [`Error::Toml`] for a value that TOML cannot express, such as a null among PEFT's fields.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|cause| Error::Toml(cause.to_string()))
    }

    /// Writes a TOML file, which appears whole.
    ///
    /// # Errors
    /// As [`Config::to_toml`]; a file that cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = self.to_toml()?;
        files::atomic_write::file(path, |out| std::io::Write::write_all(out, text.as_bytes()))
            .map_err(|cause| Error::File { path: path.to_owned(), reason: cause.to_string() })
    }
}

impl FromStr for Config {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut given = Given::default();
        given.text(text, "text")?;
        given.config(given.task().unwrap_or_default())
    }
}

/// Returns the message of a TOML error with its line.
fn with_line(text: &str, cause: &toml::de::Error) -> String {
    let message = nearest::with_suggestion(&cause.message().lines().collect::<Vec<_>>().join(" "));
    let Some(before) = cause.span().and_then(|span| text.get(..span.start)) else { return message };
    let number = before.matches('\n').count();
    let line = text.lines().nth(number).unwrap_or_default().trim();
    format!("line {} (`{line}`): {message}", number + 1)
}
