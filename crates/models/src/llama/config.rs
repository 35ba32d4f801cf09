//! What a `config.json` says of a Llama or a Qwen2.

use std::path::Path;

use runtime::fused::rope::{Frequencies, Scaling};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::attention::AttentionPath;
use crate::dropout::check_rate;
use crate::error::{Error, Result};
use crate::linear::positive;

const WHAT: &str = "Llama or Qwen2";

/// Whose configuration it is: `model_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Llama 1 to 3.
    #[default]
    Llama,
    /// Qwen2 and Qwen2.5: biases on queries, keys and values.
    Qwen2,
}

impl Family {
    /// Both of them.
    const ALL: [Self; 2] = [Self::Llama, Self::Qwen2];

    /// As `model_type` names it.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
        }
    }

    /// As `architectures` names it.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
        }
    }
}

/// Sizes and options of a [`Llama`](super::Llama). Reads and writes Hugging Face's `config.json` through serde
/// (`serde_json::from_str`), both the older form (`rope_theta`, `rope_scaling`) and transformers 5's (`rope_parameters`); what
/// the file leaves out is as transformers has it. What cannot be computed here (another activation, a sliding window, another
/// scaling of the rotary embedding) is refused by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "HuggingFace", into = "HuggingFace")]
pub struct LlamaConfig {
    /// Llama or Qwen2.
    pub family: Family,
    /// Number of tokens.
    pub vocab_size: i64,
    /// Width.
    pub hidden_size: i64,
    /// Width within the MLP.
    pub intermediate_size: i64,
    /// Number of blocks.
    pub num_hidden_layers: i64,
    /// Heads of the queries.
    pub num_attention_heads: i64,
    /// Heads of keys and values; they divide those of the queries.
    pub num_key_value_heads: i64,
    /// Width of a head, even.
    pub head_dim: i64,
    /// The longest row.
    pub max_position_embeddings: i64,
    /// Added to the mean square.
    pub rms_norm_eps: f64,
    /// How the heads turn with their places.
    pub rope: Frequencies,
    /// Whether the head's weights are the embedding's.
    pub tie_word_embeddings: bool,
    /// Whether a Llama's four projections of attention have biases. A Qwen2 has them on queries, keys and values always.
    pub attention_bias: bool,
    /// Whether the three projections of a Llama's MLP have them.
    pub mlp_bias: bool,
    /// Probability that an attention weight is dropped in training.
    pub attention_dropout: f64,
    /// Standard deviation of first weights.
    pub initializer_range: f64,
    /// How attention is computed. Not in the file.
    pub attention: AttentionPath,
}

impl LlamaConfig {
    /// A Llama of these sizes with heads that fill the width, as many of keys as of queries, rows of 2048, and Llama 2's
    /// options; take others by field update.
    pub fn llama(vocab_size: i64, hidden_size: i64, intermediate_size: i64, layers: i64, heads: i64) -> Self {
        Self {
            family: Family::Llama,
            vocab_size,
            hidden_size,
            intermediate_size,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: heads,
            head_dim: hidden_size / heads.max(1),
            max_position_embeddings: 2048,
            rms_norm_eps: 1e-6,
            rope: Frequencies::default(),
            tie_word_embeddings: false,
            attention_bias: false,
            mlp_bias: false,
            attention_dropout: 0.0,
            initializer_range: 0.02,
            attention: AttentionPath::Fused,
        }
    }

    /// The same as a Qwen2: biases on queries, keys and values, a tied head, theta 10⁶.
    pub fn qwen2(vocab_size: i64, hidden_size: i64, intermediate_size: i64, layers: i64, heads: i64) -> Self {
        Self {
            family: Family::Qwen2,
            tie_word_embeddings: true,
            rope: Frequencies { theta: 1e6, ..Frequencies::default() },
            ..Self::llama(vocab_size, hidden_size, intermediate_size, layers, heads)
        }
    }

    /// Reads a `config.json`.
    ///
    /// # Errors
    /// [`Error::File`] with the path: a file that is not there, no JSON, another architecture, an option that is not known.
    pub fn read(path: &Path) -> Result<Self> {
        let file = |reason: String| Error::File { path: path.to_owned(), reason };
        let text = std::fs::read_to_string(path).map_err(|cause| file(cause.to_string()))?;
        serde_json::from_str(&text).map_err(|cause| file(cause.to_string()))
    }

    /// Whether queries, keys and values have biases.
    pub fn qkv_bias(&self) -> bool {
        self.family == Family::Qwen2 || self.attention_bias
    }

    /// Whether the projection after attention has one.
    pub fn output_bias(&self) -> bool {
        self.family == Family::Llama && self.attention_bias
    }

    /// Refuses sizes that make no model.
    pub(super) fn check(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        positive(WHAT, &sizes)?;
        check_rate(WHAT, self.attention_dropout)?;
        let config = |reason: String| Err(Error::Config { what: WHAT, reason });
        if self.num_attention_heads % self.num_key_value_heads != 0 {
            return config(format!(
                "`num_key_value_heads` {} does not divide `num_attention_heads` {}; take a divisor",
                self.num_key_value_heads, self.num_attention_heads
            ));
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            return config(format!("`rms_norm_eps` is {}; expected a number from 0 on", self.rms_norm_eps));
        }
        Ok(())
    }
}

/// The file, as transformers writes it. Fields that are not named here say nothing about the computation.
#[derive(Clone, Serialize, Deserialize)]
struct HuggingFace {
    #[serde(default)]
    model_type: Option<String>,
    #[serde(default, skip_serializing)]
    architectures: Option<Vec<String>>,
    vocab_size: i64,
    hidden_size: i64,
    intermediate_size: i64,
    num_hidden_layers: i64,
    num_attention_heads: i64,
    #[serde(default)]
    num_key_value_heads: Option<i64>,
    #[serde(default)]
    head_dim: Option<i64>,
    #[serde(default)]
    max_position_embeddings: Option<i64>,
    #[serde(default = "eps")]
    rms_norm_eps: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rope_parameters: Option<Rope>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rope_scaling: Option<Rope>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rope_theta: Option<f64>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attention_bias: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mlp_bias: Option<bool>,
    #[serde(default)]
    attention_dropout: f64,
    #[serde(default = "initializer_range")]
    initializer_range: f64,
    #[serde(default = "silu")]
    hidden_act: String,
    #[serde(default, skip_serializing)]
    use_sliding_window: bool,
    #[serde(default, skip_serializing)]
    layer_types: Option<Vec<String>>,
}

fn eps() -> f64 {
    1e-6
}

fn initializer_range() -> f64 {
    0.02
}

fn silu() -> String {
    "silu".to_owned()
}

/// `rope_parameters`, or `rope_scaling` of older files, where the kind is also called `type`.
#[derive(Clone, Serialize, Deserialize)]
struct Rope {
    #[serde(default, alias = "type", skip_serializing_if = "Option::is_none")]
    rope_type: Option<String>,
    #[serde(flatten)]
    numbers: serde_json::Map<String, Value>,
}

impl Rope {
    fn number(&self, name: &str) -> Result<f64> {
        self.numbers.get(name).and_then(Value::as_f64).ok_or_else(|| {
            refuse(format!("the rotary embedding's scaling has no number `{name}`; it needs one"))
        })
    }

    fn scaling(&self, places: i64) -> Result<Scaling> {
        match self.rope_type.as_deref().unwrap_or("default") {
            "default" => Ok(Scaling::None),
            "linear" => Ok(Scaling::Linear { factor: self.number("factor")? }),
            "llama3" => Ok(Scaling::Llama3 {
                factor: self.number("factor")?,
                low_freq_factor: self.number("low_freq_factor")?,
                high_freq_factor: self.number("high_freq_factor")?,
                original_places: self.number("original_max_position_embeddings").unwrap_or(places as f64),
            }),
            other => Err(refuse(format!(
                "the rotary embedding is scaled by `{other}`; known are default, linear and llama3"
            ))),
        }
    }
}

fn refuse(reason: String) -> Error {
    Error::Config { what: WHAT, reason }
}

/// Whose file it is: `model_type` says so, or else `architectures`. A head other than a language model's is refused.
fn family(file: &HuggingFace) -> Result<Family> {
    let known = |name: fn(Family) -> &'static str| Family::ALL.map(name).join(" and ");
    let architecture = file.architectures.as_ref().and_then(|names| names.first());
    let by_architecture = architecture.map(|found| {
        Family::ALL.into_iter().find(|family| family.architecture() == found).ok_or_else(|| {
            refuse(format!("`architectures` names `{found}`; known are {}", known(Family::architecture)))
        })
    });
    match &file.model_type {
        Some(found) => {
            let family =
                Family::ALL.into_iter().find(|family| family.model_type() == found).ok_or_else(|| {
                    refuse(format!("`model_type` is `{found}`; known are {}", known(Family::model_type)))
                })?;
            match by_architecture.transpose()? {
                Some(other) if other != family => Err(refuse(format!(
                    "`model_type` is `{found}`, but `architectures` names `{}`; they must agree",
                    other.architecture()
                ))),
                _ => Ok(family),
            }
        }
        None => by_architecture.unwrap_or_else(|| {
            Err(refuse(format!("there is no `model_type`; known are {}", known(Family::model_type))))
        }),
    }
}

impl TryFrom<HuggingFace> for LlamaConfig {
    type Error = Error;

    fn try_from(file: HuggingFace) -> Result<Self> {
        let family = family(&file)?;
        if file.hidden_act != "silu" {
            return Err(refuse(format!("`hidden_act` is `{}`; known is silu", file.hidden_act)));
        }
        let windowed = |layers: &Vec<String>| layers.iter().any(|layer| layer != "full_attention");
        if file.use_sliding_window || file.layer_types.as_ref().is_some_and(windowed) {
            return Err(refuse(
                "attention has a sliding window, which is not computed here; set `use_sliding_window` to false if every \
                 layer attends in full"
                    .to_owned(),
            ));
        }
        let llama = family == Family::Llama;
        let places = file.max_position_embeddings.unwrap_or(if llama { 2048 } else { 32768 });
        let rope = file.rope_parameters.as_ref().or(file.rope_scaling.as_ref());
        let theta = rope.and_then(|rope| rope.numbers.get("rope_theta")).and_then(Value::as_f64);
        let scaling = rope.map_or(Ok(Scaling::None), |rope| rope.scaling(places))?;
        let (hidden, heads) = (file.hidden_size, file.num_attention_heads);
        if file.head_dim.is_none() && heads > 0 && hidden % heads != 0 {
            return Err(refuse(format!(
                "`num_attention_heads` {heads} does not divide `hidden_size` {hidden}; take a divisor, or give `head_dim`"
            )));
        }
        let config = Self {
            family,
            vocab_size: file.vocab_size,
            hidden_size: file.hidden_size,
            intermediate_size: file.intermediate_size,
            num_hidden_layers: file.num_hidden_layers,
            num_attention_heads: file.num_attention_heads,
            num_key_value_heads: file.num_key_value_heads.unwrap_or(file.num_attention_heads),
            head_dim: file.head_dim.unwrap_or(hidden / heads.max(1)),
            max_position_embeddings: places,
            rms_norm_eps: file.rms_norm_eps,
            rope: Frequencies { theta: theta.or(file.rope_theta).unwrap_or(10_000.0), scaling },
            tie_word_embeddings: file.tie_word_embeddings,
            attention_bias: llama && file.attention_bias.unwrap_or(false),
            mlp_bias: llama && file.mlp_bias.unwrap_or(false),
            attention_dropout: file.attention_dropout,
            initializer_range: file.initializer_range,
            attention: AttentionPath::default(),
        };
        config.check()?;
        Ok(config)
    }
}

impl From<LlamaConfig> for HuggingFace {
    fn from(config: LlamaConfig) -> Self {
        let theta = config.rope.theta;
        let (kind, mut numbers) = match config.rope.scaling {
            Scaling::None => ("default", json!({})),
            Scaling::Linear { factor } => ("linear", json!({ "factor": factor })),
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_places } => (
                "llama3",
                json!({
                    "factor": factor,
                    "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor,
                    "original_max_position_embeddings": original_places,
                }),
            ),
        };
        numbers["rope_theta"] = json!(theta);
        let numbers = numbers.as_object().cloned().unwrap_or_default();
        let llama = config.family == Family::Llama;
        Self {
            model_type: Some(config.family.model_type().to_owned()),
            architectures: None,
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            num_hidden_layers: config.num_hidden_layers,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: Some(config.num_key_value_heads),
            head_dim: Some(config.head_dim),
            max_position_embeddings: Some(config.max_position_embeddings),
            rms_norm_eps: config.rms_norm_eps,
            rope_parameters: Some(Rope { rope_type: Some(kind.to_owned()), numbers }),
            rope_scaling: None,
            rope_theta: None,
            tie_word_embeddings: config.tie_word_embeddings,
            attention_bias: llama.then_some(config.attention_bias),
            mlp_bias: llama.then_some(config.mlp_bias),
            attention_dropout: config.attention_dropout,
            initializer_range: config.initializer_range,
            hidden_act: silu(),
            use_sliding_window: false,
            layer_types: None,
        }
    }
}
