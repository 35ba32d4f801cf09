//! An adapter's configuration in PEFT's format: `adapter_config.json`.

use std::collections::BTreeMap;

use models::DecoderConfig;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::adapters::plan::tied_adapter;
use crate::error::{Result, unsupported};
use crate::init::Init;
use crate::matches::nearest;

/// Module names: a list of names or name suffixes, or a regular expression for whole names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Names {
    /// `all-linear` for every projection except the head; otherwise a regular expression that matches the whole name.
    Pattern(String),
    /// Modules with one of these names, or whose name ends with a dot and one of them.
    List(Vec<String>),
}

impl<T: Into<String>, const N: usize> From<[T; N]> for Names {
    fn from(names: [T; N]) -> Self {
        Self::List(names.map(Into::into).into())
    }
}

/// One layer or several.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Layers {
    /// One layer.
    One(i64),
    /// Several layers.
    Several(Vec<i64>),
}

/// Tokens whose rows are trained alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TokenIndices {
    /// Tokens of the embedding, and of a head that is tied to it.
    Embedding(Vec<i64>),
    /// Tokens by the ends of the names of the embedding and of the head: `embed_tokens`, `lm_head`. A head that is tied to the embedding
    /// follows it unless it has tokens of its own.
    ByModule(BTreeMap<String, Vec<i64>>),
}

impl TokenIndices {
    /// Returns the tokens of the embedding, or of the first module.
    pub fn first(&self) -> &[i64] {
        match self {
            Self::Embedding(tokens) => tokens,
            Self::ByModule(modules) => modules.values().next().map_or(&[], Vec::as_slice),
        }
    }

    /// Returns the largest token.
    pub fn largest(&self) -> Option<i64> {
        match self {
            Self::Embedding(tokens) => tokens.iter().copied().max(),
            Self::ByModule(modules) => modules.values().flatten().copied().max(),
        }
    }
}

/// Which biases of the base are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BiasTraining {
    /// None.
    #[default]
    None,
    /// All biases of the model. They are trained in place: a model with such an adapter disabled is not the base model.
    All,
    /// Biases of adapted projections.
    LoraOnly,
}

/// Which modules are adapted, and how: PEFT's `LoraConfig`, field by field. Other fields are preserved when a file is read and
/// written; one that would change the computation is refused by name.
///
/// ```
/// use lora::LoraConfig;
/// use models::DecoderConfig;
///
/// let config = LoraConfig {
///     r: 8,
///     lora_alpha: 16.0,
///     lora_dropout: 0.05,
///     target_modules: Some(["q_proj", "k_proj", "v_proj", "o_proj"].into()),
///     ..LoraConfig::default()
/// };
/// let model = DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::llama(100, 16, 40, 2, 4) };
/// assert_eq!(config.trainable_parameters(&model)?, 2 * 8 * (2 * (16 + 16) + 2 * (16 + 8)));
/// # Ok::<(), lora::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoraConfig {
    /// Rank.
    pub r: i64,
    /// α; the product is scaled by α/r.
    #[serde(serialize_with = "as_python")]
    pub lora_alpha: f64,
    /// Dropout of the adapter's input.
    pub lora_dropout: f64,
    /// Scale by α/√r.
    pub use_rslora: bool,
    /// DoRA.
    pub use_dora: bool,
    /// The initialisation of A and B, in PEFT's values: `true`, `false`, `"gaussian"`, `"pissa"`, `"olora"`, `"orthogonal"`.
    /// See [`Init`].
    pub init_lora_weights: Value,
    /// Modules to adapt; `None` for q_proj and v_proj, as in PEFT, or qkv_proj in Phi-3, unless there are `target_parameters`.
    pub target_modules: Option<Names>,
    /// Tensors of all experts of a mixture's layer to adapt, by the ends of their names: `mlp.experts.gate_up_proj`,
    /// `mlp.experts.down_proj`. With `target_modules` of `None` nothing else is adapted. Excluded modules and layers do not concern them.
    pub target_parameters: Option<Vec<String>>,
    /// Modules to exclude from the targets.
    pub exclude_modules: Option<Names>,
    /// Only these layers, if the targets are a list.
    pub layers_to_transform: Option<Layers>,
    /// The name before a layer's number; `None` for any.
    pub layers_pattern: Option<Names>,
    /// Other ranks, by regular expressions for the ends of names.
    pub rank_pattern: Map<String, Value>,
    /// Other values of α, likewise.
    pub alpha_pattern: Map<String, Value>,
    /// Which biases are trained.
    pub bias: BiasTraining,
    /// Modules that are trained and saved as a whole, by the ends of their names.
    pub modules_to_save: Option<Vec<String>>,
    /// Tokens whose rows of the embedding and of the head are trained, and replace the base's: for new tokens.
    /// [`models::token_rows`] has the mathematics.
    pub trainable_token_indices: Option<TokenIndices>,
    /// Whether to train a tied head and embedding as one if either is in `modules_to_save`. (PEFT's default is false: the head
    /// is trained separately from the embedding, and lost if the merged model is saved as tied.)
    pub ensure_weight_tying: bool,
    /// Preserved in files: projections here are always `[out, in]`.
    pub fan_in_fan_out: bool,
    /// Preserved in files.
    pub base_model_name_or_path: Option<String>,
    /// The seed of the initialisation; not part of the file.
    #[serde(skip)]
    pub seed: u64,
    /// The file that it was read from, field by field; empty for a configuration created here.
    #[serde(skip)]
    pub read: Map<String, Value>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            r: 8,
            lora_alpha: 8.0,
            lora_dropout: 0.0,
            use_rslora: false,
            use_dora: false,
            init_lora_weights: Value::Bool(true),
            target_modules: None,
            target_parameters: None,
            exclude_modules: None,
            layers_to_transform: None,
            layers_pattern: None,
            rank_pattern: Map::new(),
            alpha_pattern: Map::new(),
            bias: BiasTraining::None,
            modules_to_save: None,
            trainable_token_indices: None,
            ensure_weight_tying: false,
            fan_in_fan_out: false,
            base_model_name_or_path: None,
            seed: 0,
            read: Map::new(),
        }
    }
}

/// Writes a whole number without a point, as Python writes an `int`.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn as_python<S: serde::Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if value.fract() == 0.0 && value.abs() < 9e15 {
        serializer.serialize_i64(*value as i64)
    } else {
        serializer.serialize_f64(*value)
    }
}

impl LoraConfig {
    /// Returns the initialisation of A and B.
    ///
    /// # Errors
    /// [`runtime::Error::Unsupported`] for an initialisation that [`Init`] does not have.
    pub fn init(&self) -> Result<Init> {
        let named = match &self.init_lora_weights {
            Value::Bool(true) => Some(Init::Kaiming),
            Value::Bool(false) => Some(Init::Random),
            Value::String(name) => match name.to_lowercase().as_str() {
                "gaussian" => Some(Init::Gaussian),
                "pissa" => Some(Init::Pissa),
                name if name.starts_with("pissa_niter_") => Some(Init::Pissa),
                "olora" => Some(Init::Olora),
                "orthogonal" => Some(Init::Orthogonal),
                // These affect only initial values, which a file contains, and leave the base unchanged.
                "eva" if !self.read.is_empty() => Some(Init::Kaiming),
                _ => None,
            },
            _ => None,
        };
        const NAMES: [&str; 6] = ["true", "false", "gaussian", "pissa", "olora", "orthogonal"];
        let near = self.init_lora_weights.as_str().and_then(|name| nearest(name, NAMES.into_iter()));
        named.ok_or_else(|| unsupported("init_lora_weights", match near {
                Some(name) => format!("{} (did you mean \"{name}\"?)", self.init_lora_weights),
                None => self.init_lora_weights.to_string(),
            }, "take true, false, \"gaussian\", \"pissa\", \"olora\" or \"orthogonal\", or convert the adapter to one \
                     that leaves the base as it is (PEFT: path_initial_model_for_weight_conversion)"))
    }

    /// Checks `ensure_weight_tying` before a training on a model, whose weights are not needed: it has to tie something, and a tied head
    /// cannot be adapted.
    ///
    /// # Errors
    /// [`runtime::Error::Unsupported`]; an invalid regular expression.
    pub fn check_tying(&self, model: &DecoderConfig) -> Result<()> {
        const ENDS: [&str; 2] = ["lm_head", "model.embed_tokens"];
        if !self.ensure_weight_tying {
            return Ok(());
        }
        let refuse = |found: &str, remedy| Err(unsupported("ensure_weight_tying", found, remedy));
        if !model.tie_word_embeddings {
            return refuse("true, but the head and the embedding of this model are not tied", "leave it out");
        }
        let saved =
            |name: &str| self.modules_to_save.iter().flatten().any(|saved| name.ends_with(saved.as_str()));
        if self.adapts(ENDS[0])? && !saved(ENDS[0]) {
            return Err(tied_adapter(ENDS[0]));
        }
        if !ENDS.into_iter().any(saved) {
            return refuse(
                "true, but neither `lm_head` nor `embed_tokens` is in `modules_to_save`",
                "add one of them there, or leave it out",
            );
        }
        Ok(())
    }

    /// Returns whether installing the adapter reads values of the base's weights.
    ///
    /// # Errors
    /// As [`LoraConfig::init`].
    pub fn reads_weights(&self) -> Result<bool> {
        let trains_base = self.bias != BiasTraining::None || self.modules_to_save.is_some();
        Ok(self.use_dora || trains_base || matches!(self.init()?, Init::Pissa | Init::Olora))
    }
}
