//! `config.json`, as written by transformers.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::rope_file::{self, RopeFields, Written};
use super::window_file::{rotary_layers, windows};
use super::{AttentionPath, DecoderConfig, WHAT};
use super::{gemma4, linear_attention, mixture};
use crate::error::{Error, Result};
use crate::family::{AttentionBias, Family, Windows, why_not};

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
    intermediate_size: Option<i64>,
    num_hidden_layers: i64,
    num_attention_heads: i64,
    num_key_value_heads: Option<i64>,
    head_dim: Option<i64>,
    max_position_embeddings: Option<i64>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
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
    #[serde(default, deserialize_with = "named::intermediate_size", skip_serializing_if = "Option::is_none")]
    pub(super) intermediate_size: Option<i64>,
    #[serde(deserialize_with = "named::num_hidden_layers")]
    pub(super) num_hidden_layers: i64,
    #[serde(deserialize_with = "named::num_attention_heads")]
    num_attention_heads: i64,
    #[serde(default, deserialize_with = "named::num_key_value_heads")]
    num_key_value_heads: Option<i64>,
    #[serde(default, deserialize_with = "named::head_dim")]
    pub(super) head_dim: Option<i64>,
    #[serde(default, deserialize_with = "named::max_position_embeddings")]
    max_position_embeddings: Option<i64>,
    #[serde(default, deserialize_with = "named::rms_norm_eps")]
    rms_norm_eps: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) rope_parameters: Option<RopeFields>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) rope_scaling: Option<RopeFields>,
    #[serde(default, deserialize_with = "named::rope_theta", skip_serializing_if = "Option::is_none")]
    pub(super) rope_theta: Option<f64>,
    #[serde(default, deserialize_with = "named::tie_word_embeddings")]
    tie_word_embeddings: Option<bool>,
    #[serde(default, deserialize_with = "named::attention_bias", skip_serializing_if = "Option::is_none")]
    attention_bias: Option<bool>,
    #[serde(default, deserialize_with = "named::mlp_bias", skip_serializing_if = "Option::is_none")]
    mlp_bias: Option<bool>,
    #[serde(default, deserialize_with = "named::attention_dropout")]
    attention_dropout: f64,
    #[serde(default = "initializer_range", deserialize_with = "named::initializer_range")]
    initializer_range: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hidden_act: Option<String>,
    /// Fields of some families, and those that do not affect the computation.
    #[serde(flatten)]
    pub(super) other: Map<String, Value>,
}

fn initializer_range() -> f64 {
    0.02
}

const SILU: &str = "silu";
const GELU_TANH: &str = "gelu_pytorch_tanh";

impl HuggingFace {
    /// Removes a field and returns its value; `None` for null and for a field that is missing.
    pub(super) fn take<T: serde::de::DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>> {
        let value = self.get(name);
        self.other.shift_remove(name);
        value
    }

    /// Returns a field's value; `None` for null and for a field that is missing.
    pub(super) fn get<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let value = self.other.get(name).filter(|value| !value.is_null()).cloned();
        let value = value.map(serde_json::from_value).transpose();
        value.map_err(|cause| refuse(format!("`{name}`: {cause}")))
    }

    /// Removes a number.
    pub(super) fn take_number(&mut self, name: &str) -> Result<Option<f64>> {
        self.take(name)
    }
}

/// A number as transformers writes it where it expects an integer.
pub(super) fn integral(number: f64) -> Value {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    if number.fract() == 0.0 && number.abs() < EXACT { json!(number as i64) } else { json!(number) }
}

pub(super) fn refuse(reason: String) -> Error {
    Error::Config { what: WHAT, reason }
}

/// The family of the file: from `model_type`, or else from `architectures`. Heads other than a language model's are refused.
fn family(file: &HuggingFace) -> Result<Family> {
    let families = || Family::ALL.into_iter().filter(|family| family.is_rotary());
    let known = |name: fn(Family) -> &'static str| families().map(name).collect::<Vec<_>>().join(", ");
    let unknown = |field: &str, value: &str, name: fn(Family) -> &'static str| {
        let why = why_not(value).map(|why| format!(" ({why})")).unwrap_or_default();
        refuse(format!("{field} `{value}`{why}; expected one of {}", known(name)))
    };
    let architecture = file.architectures.as_ref().and_then(|names| names.first());
    let by_architecture = architecture.map(|class| {
        families()
            .find(|family| family.architecture() == class)
            .ok_or_else(|| unknown("`architectures` names", class, Family::architecture))
    });
    match &file.model_type {
        Some(model_type) => {
            let family = families()
                .find(|family| family.model_type() == model_type)
                .ok_or_else(|| unknown("`model_type` is", model_type, Family::model_type))?;
            match by_architecture.transpose()? {
                Some(other) if other != family => Err(refuse(format!(
                    "`model_type` is `{model_type}`, but `architectures` names `{}`; they must agree",
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

/// Checks the activation of the MLP's gate, which the family decides.
fn check_activation(file: &mut HuggingFace, family: Family) -> Result<()> {
    let (field, expected) =
        if family.is_gemma() { ("hidden_activation", GELU_TANH) } else { ("hidden_act", SILU) };
    let hidden_activation: Option<String> = if family.is_gemma() { file.take(field)? } else { None };
    match hidden_activation.or(file.hidden_act.take()) {
        Some(activation) if activation != expected => {
            Err(refuse(format!("`{field}` is `{activation}`; expected {expected}")))
        }
        _ => Ok(()),
    }
}

impl HuggingFace {
    /// Removes the options that no size of a tensor depends on, and that may be of a kind that nothing here computes.
    pub(super) fn keep_sizes(&mut self) {
        (self.rope_parameters, self.rope_scaling, self.rope_theta, self.hidden_act) =
            (None, None, None, None);
        for name in [
            "hidden_activation",
            "use_bidirectional_attention",
            "partial_rotary_factor",
            "resid_pdrop",
            "embd_pdrop",
        ] {
            self.other.shift_remove(name);
        }
    }
}

impl TryFrom<HuggingFace> for DecoderConfig {
    type Error = Error;

    fn try_from(mut file: HuggingFace) -> Result<Self> {
        let family = family(&file)?;
        let facts = family.facts();
        // Each writer sets these anew.
        for name in ["dtype", "torch_dtype", "transformers_version"] {
            file.other.shift_remove(name);
        }

        // Layers: windows, rotation, dropouts.
        check_activation(&mut file, family)?;
        let (sliding_window, mut layer_types) = windows(&mut file, family)?;
        if facts.is_gemma4 {
            layer_types = gemma4::layer_types(&file, layer_types);
        }
        let rotary_layers = if facts.has_unrotated_layers { rotary_layers(&file)? } else { Vec::new() };
        if facts.has_unrotated_layers {
            file.other.shift_remove("no_rope_layers");
        }
        for name in facts.zero_fields {
            let rate = file.other.get(*name);
            if let Some(rate) = rate.filter(|rate| rate.as_f64().is_none_or(|rate| rate != 0.0)) {
                return Err(refuse(format!(
                    "`{name}` is {rate}; expected 0, since only attention has dropout"
                )));
            }
        }

        // Rotary embedding and heads.
        let positions = file.max_position_embeddings.unwrap_or(facts.positions);
        let rope = rope_file::read(&mut file, family, positions)?;
        let (hidden, heads) = (file.hidden_size, file.num_attention_heads);
        let head_dim = file.head_dim.or(facts.head_dim);
        let kv_heads = file.num_key_value_heads.unwrap_or(heads);
        if head_dim.is_none() && heads > 0 && hidden.checked_rem(heads) != Some(0) {
            return Err(refuse(format!(
                "`num_attention_heads` {heads} does not divide `hidden_size` {hidden}; take a divisor, or give `head_dim`"
            )));
        }

        // Factors of the families that have them.
        let (has_factors, gemma) = (facts.has_multipliers, family.is_gemma());
        // The scores of a Gemma 4, whose queries and keys are normalized, have no factor.
        let has_scalar = gemma && !facts.is_gemma4;
        let mut number = |name: &str, is_read: bool| if is_read { file.take_number(name) } else { Ok(None) };
        let embedding_multiplier = number("embedding_multiplier", has_factors)?.unwrap_or(1.0);
        let attention_multiplier =
            number("attention_multiplier", has_factors)?.or((has_factors || facts.is_gemma4).then_some(1.0));
        let residual_multiplier = number("residual_multiplier", has_factors)?.unwrap_or(1.0);
        let logits_scaling = number("logits_scaling", has_factors)?.unwrap_or(1.0);
        let query_pre_attn_scalar =
            number("query_pre_attn_scalar", has_scalar)?.or(has_scalar.then_some(256.0));

        // Caps have the family's default only where the file has no such field; null is no cap.
        let mut cap = |name: &str, is_read: bool, default: Option<f64>| match file.other.contains_key(name) {
            true if is_read => file.take_number(name),
            true => Ok(None),
            false => Ok(default),
        };
        let [attn_cap, final_cap] = facts.softcaps.map_or([None; 2], |caps| caps.map(Some));
        let attn_logit_softcapping = cap("attn_logit_softcapping", facts.softcaps.is_some(), attn_cap)?;
        let final_logit_softcapping = cap("final_logit_softcapping", gemma, final_cap)?;

        let linear_attention =
            facts.has_linear_layers.then(|| linear_attention::read(&mut file)).transpose()?;
        let gemma4 = facts.is_gemma4.then(|| gemma4::read(&mut file, &layer_types, kv_heads)).transpose()?;
        let mixture = facts.has_experts.then(|| mixture::read(&mut file, facts)).transpose()?;
        let of_experts = mixture
            .as_ref()
            .filter(|_| facts.has_shared_expert || facts.has_clamped_experts)
            .map(|mixture| mixture.intermediate_size);
        let intermediate_size = of_experts.or(file.intermediate_size).ok_or_else(|| {
            refuse("`intermediate_size` is missing; expected the width of the MLP".to_owned())
        })?;
        let config = Self {
            family,
            vocab_size: file.vocab_size,
            hidden_size: file.hidden_size,
            intermediate_size,
            num_hidden_layers: file.num_hidden_layers,
            num_attention_heads: file.num_attention_heads,
            num_key_value_heads: kv_heads,
            head_dim: head_dim.unwrap_or(hidden / heads.max(1)),
            max_position_embeddings: positions,
            rms_norm_eps: file.rms_norm_eps.unwrap_or(facts.eps),
            rope: rope.rope,
            tie_word_embeddings: file.tie_word_embeddings.unwrap_or(facts.tied),
            attention_bias: match facts.attention_bias {
                AttentionBias::Configured => file.attention_bias.unwrap_or(false),
                AttentionBias::UnlessFalse => file.attention_bias.unwrap_or(true),
                AttentionBias::None | AttentionBias::QueriesKeysValues | AttentionBias::All => false,
            },
            mlp_bias: facts.reads_mlp_bias && file.mlp_bias.unwrap_or(false),
            attention_dropout: file.attention_dropout,
            initializer_range: file.initializer_range,
            sliding_window,
            layer_types,
            rotary_layers,
            local_rope: rope.local,
            long_rope: rope.long,
            partial_rotary_factor: rope.partial,
            embedding_multiplier,
            attention_multiplier,
            query_pre_attn_scalar,
            residual_multiplier,
            logits_scaling,
            attn_logit_softcapping,
            final_logit_softcapping,
            mixture,
            linear_attention,
            gemma4,
            attention: AttentionPath::default(),
            other_fields: file.other,
        };
        config.check()?;
        Ok(config)
    }
}

impl From<DecoderConfig> for HuggingFace {
    fn from(config: DecoderConfig) -> Self {
        let family = config.family;
        let facts = family.facts();
        let mut other = config.other_fields.clone();
        let Written { parameters, scaling, theta } = rope_file::write(&config, &mut other);
        let mut put = |name: &str, value: Value| {
            other.insert(name.to_owned(), value);
        };
        let types = |config: &DecoderConfig| -> Vec<&str> {
            config.layer_types.iter().map(|layer| layer.name()).collect()
        };
        if facts.windows == Windows::Optional && config.sliding_window.is_some() {
            put("use_sliding_window", json!(true));
        }
        if config.sliding_window.is_some() || facts.windows == Windows::Configured {
            put("sliding_window", json!(config.sliding_window));
        }
        if !config.layer_types.is_empty() {
            put("layer_types", json!(types(&config)));
        }
        if facts.has_unrotated_layers {
            let all = vec![true; usize::try_from(config.num_hidden_layers).unwrap_or(0)];
            let rotates = if config.rotary_layers.is_empty() { &all } else { &config.rotary_layers };
            put(
                "no_rope_layers",
                json!(rotates.iter().map(|&rotates| i64::from(rotates)).collect::<Vec<_>>()),
            );
        }
        if facts.has_multipliers {
            put("embedding_multiplier", json!(config.embedding_multiplier));
            put("attention_multiplier", json!(config.attention_scale().unwrap_or(1.0)));
            put("residual_multiplier", json!(config.residual_multiplier));
            put("logits_scaling", json!(config.logits_scaling));
        }
        if family.is_gemma() {
            put("hidden_activation", json!(GELU_TANH));
            if !facts.is_gemma4 {
                put("query_pre_attn_scalar", integral(config.query_pre_attn_scalar.unwrap_or(256.0)));
            }
            put("final_logit_softcapping", json!(config.final_logit_softcapping));
        }
        for (name, value) in config.mixture.iter().flat_map(mixture::write) {
            put(name, value);
        }
        for (name, value) in config.linear_attention.iter().flat_map(linear_attention::write) {
            put(name, value);
        }
        for (name, value) in config.gemma4.iter().flat_map(|gemma4| gemma4::write(&config, gemma4)) {
            put(name, value);
        }
        if facts.softcaps.is_some() {
            put("attn_logit_softcapping", json!(config.attn_logit_softcapping));
        }
        Self {
            model_type: Some(family.model_type().to_owned()),
            architectures: None,
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            // A family whose layers all have experts has no such field.
            intermediate_size: (!facts.has_shared_expert).then_some(config.intermediate_size),
            num_hidden_layers: config.num_hidden_layers,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: Some(config.num_key_value_heads),
            head_dim: Some(config.head_dim),
            max_position_embeddings: Some(config.max_position_embeddings),
            rms_norm_eps: Some(config.rms_norm_eps),
            rope_parameters: Some(parameters),
            rope_scaling: scaling,
            rope_theta: theta,
            tie_word_embeddings: Some(config.tie_word_embeddings),
            attention_bias: matches!(
                facts.attention_bias,
                AttentionBias::Configured | AttentionBias::UnlessFalse
            )
            .then_some(config.attention_bias),
            mlp_bias: facts.reads_mlp_bias.then_some(config.mlp_bias),
            attention_dropout: config.attention_dropout,
            initializer_range: config.initializer_range,
            hidden_act: (!family.is_gemma()).then(|| SILU.to_owned()),
            other,
        }
    }
}
