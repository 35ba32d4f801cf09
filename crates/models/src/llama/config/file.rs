//! `config.json`, as written by transformers.

use runtime::fused::rope::{Frequencies, Scaling};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Family, LlamaConfig, WHAT};
use crate::attention::AttentionPath;
use crate::error::{Error, Result};

/// Functions that read a field and name it if its value has the wrong type; serde alone does not name it.
macro_rules! named {
    ($($field:ident: $kind:ty),* $(,)?) => {
        mod named {
            use serde::{Deserialize, Deserializer, de::Error};

            $(pub(super) fn $field<'de, D: Deserializer<'de>>(field: D) -> Result<$kind, D::Error> {
                <$kind>::deserialize(field)
                    .map_err(|cause| D::Error::custom(format!("`{}`: {cause}", stringify!($field))))
            })*
        }
    };
}

named! {
    vocab_size: i64,
    hidden_size: i64,
    intermediate_size: i64,
    num_hidden_layers: i64,
    num_attention_heads: i64,
    num_key_value_heads: Option<i64>,
    head_dim: Option<i64>,
    max_position_embeddings: Option<i64>,
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    attention_dropout: f64,
    initializer_range: f64,
}

/// The file, as written by transformers. Other fields do not affect the computation.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct HuggingFace {
    #[serde(default)]
    model_type: Option<String>,
    #[serde(default, skip_serializing)]
    architectures: Option<Vec<String>>,
    #[serde(deserialize_with = "named::vocab_size")]
    vocab_size: i64,
    #[serde(deserialize_with = "named::hidden_size")]
    hidden_size: i64,
    #[serde(deserialize_with = "named::intermediate_size")]
    intermediate_size: i64,
    #[serde(deserialize_with = "named::num_hidden_layers")]
    num_hidden_layers: i64,
    #[serde(deserialize_with = "named::num_attention_heads")]
    num_attention_heads: i64,
    #[serde(default, deserialize_with = "named::num_key_value_heads")]
    num_key_value_heads: Option<i64>,
    #[serde(default, deserialize_with = "named::head_dim")]
    head_dim: Option<i64>,
    #[serde(default, deserialize_with = "named::max_position_embeddings")]
    max_position_embeddings: Option<i64>,
    #[serde(default = "eps", deserialize_with = "named::rms_norm_eps")]
    rms_norm_eps: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rope_parameters: Option<Rope>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rope_scaling: Option<Rope>,
    #[serde(default, deserialize_with = "named::rope_theta", skip_serializing_if = "Option::is_none")]
    rope_theta: Option<f64>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attention_bias: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mlp_bias: Option<bool>,
    #[serde(default, deserialize_with = "named::attention_dropout")]
    attention_dropout: f64,
    #[serde(default = "initializer_range", deserialize_with = "named::initializer_range")]
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

/// `rope_parameters`, or `rope_scaling` in older files, where `rope_type` may be called `type`.
#[derive(Clone, Serialize, Deserialize)]
struct Rope {
    #[serde(default, alias = "type", skip_serializing_if = "Option::is_none")]
    rope_type: Option<String>,
    #[serde(flatten)]
    numbers: serde_json::Map<String, Value>,
}

impl Rope {
    /// An optional number.
    fn optional(&self, name: &str) -> Result<Option<f64>> {
        match self.numbers.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| {
                refuse(format!("`{name}` of the rotary embedding is {value}; expected a number"))
            }),
        }
    }

    fn number(&self, name: &str) -> Result<f64> {
        self.optional(name)?
            .ok_or_else(|| refuse(format!("the scaling of the rotary embedding needs the number `{name}`")))
    }

    fn scaling(&self, positions: i64) -> Result<Scaling> {
        match self.rope_type.as_deref().unwrap_or("default") {
            "default" => Ok(Scaling::None),
            "linear" => Ok(Scaling::Linear { factor: self.number("factor")? }),
            "llama3" => Ok(Scaling::Llama3 {
                factor: self.number("factor")?,
                low_freq_factor: self.number("low_freq_factor")?,
                high_freq_factor: self.number("high_freq_factor")?,
                original_positions: self
                    .optional("original_max_position_embeddings")?
                    .unwrap_or(positions as f64),
            }),
            other => Err(refuse(format!(
                "the rotary embedding has the scaling `{other}`; expected default, linear or llama3"
            ))),
        }
    }
}

fn refuse(reason: String) -> Error {
    Error::Config { what: WHAT, reason }
}

/// The family of the file: from `model_type`, or else from `architectures`. Heads other than a language model's are refused.
fn family(file: &HuggingFace) -> Result<Family> {
    let known = |name: fn(Family) -> &'static str| Family::ALL.map(name).join(" and ");
    let architecture = file.architectures.as_ref().and_then(|names| names.first());
    let by_architecture = architecture.map(|found| {
        Family::ALL.into_iter().find(|family| family.architecture() == found).ok_or_else(|| {
            refuse(format!(
                "`architectures` names `{found}`; expected one of {}",
                known(Family::architecture)
            ))
        })
    });
    match &file.model_type {
        Some(found) => {
            let family =
                Family::ALL.into_iter().find(|family| family.model_type() == found).ok_or_else(|| {
                    refuse(format!(
                        "`model_type` is `{found}`; expected one of {}",
                        known(Family::model_type)
                    ))
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
            Err(refuse(format!("`model_type` is missing; expected one of {}", known(Family::model_type))))
        }),
    }
}

impl TryFrom<HuggingFace> for LlamaConfig {
    type Error = Error;

    fn try_from(file: HuggingFace) -> Result<Self> {
        let family = family(&file)?;
        if file.hidden_act != "silu" {
            return Err(refuse(format!("`hidden_act` is `{}`; expected silu", file.hidden_act)));
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
        let positions = file.max_position_embeddings.unwrap_or(if llama { 2048 } else { 32768 });
        let rope = file.rope_parameters.as_ref().or(file.rope_scaling.as_ref());
        let theta = rope.map_or(Ok(None), |rope| rope.optional("rope_theta"))?;
        let scaling = rope.map_or(Ok(Scaling::None), |rope| rope.scaling(positions))?;
        let (hidden, heads) = (file.hidden_size, file.num_attention_heads);
        if file.head_dim.is_none() && heads > 0 && hidden.checked_rem(heads) != Some(0) {
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
            max_position_embeddings: positions,
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
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => (
                "llama3",
                json!({
                    "factor": factor,
                    "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor,
                    "original_max_position_embeddings": original_positions,
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
