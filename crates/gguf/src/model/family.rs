//! llama.cpp's assumptions about each family of decoders.
//!
//! Source: llama.cpp's `conversion/*.py`, `gguf-py/gguf/constants.py` and `src/models/*.cpp` of 2026.

use std::ops::Deref;

use decoder::{
    ClampedSwiglu, DecoderConfig, Facts, PER_LAYER_GATE, PER_LAYER_PROJECTION, POST_PER_LAYER_NORM,
    QueryKeyNorm, SINKS, Sizes, Windows,
};
use serde_json::Value;

use super::names::of_linear_attention;
use crate::error::{Result, file_error, unsupported};
use crate::experts::MixtureTensor;
use crate::json::Fields;

/// A family, and how llama.cpp reads it.
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) kind: decoder::Family,
    /// llama.cpp's architecture.
    pub(crate) architecture: &'static str,
    /// Whether llama.cpp rotates neighbouring pairs of q and k, so that the rows of each head have to be interleaved.
    pub(crate) permuted: bool,
    /// Projections for whose bias llama.cpp has a place.
    pub(crate) biases: &'static [&'static str],
    /// Whether llama.cpp needs a head even where it is tied.
    pub(crate) head_required: bool,
    /// Whether llama.cpp has a head that is not the embedding.
    pub(crate) has_head: bool,
    /// Whether a head may be wider or narrower than hidden_size / heads.
    pub(crate) own_head_dim: bool,
    /// Values of `rope_type` that llama.cpp computes for this family.
    pub(crate) rope_types: &'static [&'static str],
    /// Every n-th layer differs: it attends to everything (Gemma), or has no rotary embedding (SmolLM3). llama.cpp's own constant.
    pub(crate) period: Option<u32>,
}

impl Deref for Family {
    type Target = Facts;

    fn deref(&self) -> &Facts {
        self.kind.facts()
    }
}

const ALL: &[&str] = &["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
const ATTENTION: &[&str] = &["q_proj", "k_proj", "v_proj", "o_proj"];
const QKV: &[&str] = &["q_proj", "k_proj", "v_proj"];

const LLAMA_ROPE: &[&str] = &["default", "linear", "llama3", "yarn"];
const GEMMA_ROPE: &[&str] = &["default", "linear"];

const LLAMA: Family = Family {
    kind: decoder::Family::Llama,
    architecture: "llama",
    permuted: true,
    biases: ALL,
    head_required: false,
    has_head: true,
    own_head_dim: true,
    rope_types: LLAMA_ROPE,
    period: None,
};

/// A family whose pairs of q and k are not permuted.
const OTHER: Family =
    Family { permuted: false, biases: &[], rope_types: &["default", "linear", "yarn"], ..LLAMA };

static FAMILIES: [Family; 15] = [
    LLAMA,
    Family { kind: decoder::Family::Mistral, biases: &[], ..LLAMA },
    Family { kind: decoder::Family::Granite, architecture: "granite", own_head_dim: false, ..LLAMA },
    Family {
        kind: decoder::Family::SmolLm3,
        architecture: "smollm3",
        biases: QKV,
        own_head_dim: false,
        rope_types: OTHER.rope_types,
        period: Some(4),
        ..LLAMA
    },
    Family { kind: decoder::Family::Qwen2, architecture: "qwen2", biases: QKV, own_head_dim: false, ..OTHER },
    Family { kind: decoder::Family::Qwen3, architecture: "qwen3", ..OTHER },
    Family { kind: decoder::Family::Qwen3Moe, architecture: "qwen3moe", ..OTHER },
    Family {
        kind: decoder::Family::GptOss,
        architecture: "gpt-oss",
        biases: ATTENTION,
        period: Some(2),
        ..OTHER
    },
    Family { kind: decoder::Family::Qwen35Moe, architecture: "qwen35moe", rope_types: &["default"], ..OTHER },
    Family { kind: decoder::Family::Qwen35, architecture: "qwen35", rope_types: &["default"], ..OTHER },
    Family {
        kind: decoder::Family::Olmo2,
        architecture: "olmo2",
        head_required: true,
        own_head_dim: false,
        ..OTHER
    },
    Family {
        kind: decoder::Family::Phi3,
        architecture: "phi3",
        own_head_dim: false,
        rope_types: &["default", "longrope", "su"],
        ..OTHER
    },
    Family {
        kind: decoder::Family::Gemma2,
        architecture: "gemma2",
        has_head: false,
        rope_types: GEMMA_ROPE,
        period: Some(2),
        ..OTHER
    },
    Family {
        kind: decoder::Family::Gemma3,
        architecture: "gemma3",
        rope_types: GEMMA_ROPE,
        period: Some(6),
        ..OTHER
    },
    Family {
        kind: decoder::Family::Gemma4,
        architecture: "gemma4",
        rope_types: &["default", "proportional"],
        ..OTHER
    },
];

impl Family {
    /// Finds the family of a configuration.
    pub(crate) fn from_config(config: &Fields) -> Result<&'static Self> {
        let model_type = config.text("model_type")?;
        let known: Vec<&str> = FAMILIES.iter().map(|family| family.model_type).collect();
        let Some(family) = FAMILIES.iter().find(|family| family.model_type == model_type) else {
            let remedy = format!("the families that can be converted are {}", known.join(", "));
            return Err(unsupported("the `model_type`", format!("`{model_type}`"), remedy));
        };
        if let Some(quantized) = config.get("quantization_config") {
            let method = quantized.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
            return Err(unsupported(
                "a quantised model",
                format!("quantization_config of `{method}`"),
                match method {
                    "mxfp4" => {
                        "save the model in bfloat16, and convert that; the type mxfp4_moe stores the same values again"
                    }
                    _ => "merge the adapter into the unquantised base, and convert that",
                },
            ));
        }
        Ok(family)
    }

    /// Finds the family of llama.cpp's architecture: of two with one architecture the first, which has the options of both.
    pub(crate) fn from_architecture(name: &str) -> Option<&'static Self> {
        FAMILIES.iter().find(|family| family.architecture == name)
    }

    /// The architectures of llama.cpp that are known.
    pub(crate) fn architectures() -> Vec<&'static str> {
        let mut all: Vec<&str> = FAMILIES.iter().map(|family| family.architecture).collect();
        all.dedup();
        all
    }

    /// The activation of the MLP's gate.
    pub(crate) fn activation(&self) -> &'static str {
        if self.is_gemma { "gelu_pytorch_tanh" } else { "silu" }
    }

    /// The s of a Gemma's factor 1/√s of the attention scores. llama.cpp knows the two models with 27 billion parameters by their number of
    /// layers.
    pub(crate) fn query_scalar(&self, layers: u64, hidden: u64, heads: u64, head_dim: u64) -> u64 {
        let largest = layers == if self.has_query_key_norms() { 62 } else { 46 };
        if largest { hidden / heads } else { head_dim }
    }

    fn has_query_key_norms(&self) -> bool {
        self.query_key_norm != QueryKeyNorm::None
    }

    /// The names of a block's matrices and norms in the files, without `.weight`.
    pub(crate) fn modules(&self) -> impl Iterator<Item = &'static str> {
        let projections = self.kind.projections().iter().map(|projection| projection.name);
        let norms = self.kind.norm_names().iter().chain(self.kind.query_key_norm_names());
        let of_gemma4: &[&str] =
            if self.is_gemma4 { &[PER_LAYER_GATE, PER_LAYER_PROJECTION, POST_PER_LAYER_NORM] } else { &[] };
        projections.chain(norms.copied()).chain(of_gemma4.iter().copied())
    }

    /// Refuses options that llama.cpp would silently read differently.
    pub(crate) fn check(&self, config: &Fields, decoder: &DecoderConfig) -> Result<()> {
        let sizes = decoder.sizes();
        let refuse = |key: &str, remedy: String| {
            let value = config.get(key).map_or_else(|| "its default".to_owned(), Value::to_string);
            Err(unsupported(format!("`{key}` of a `{}`", self.model_type), value, remedy))
        };
        if !self.own_head_dim && sizes.head_dim * sizes.heads != sizes.hidden {
            return refuse(
                "head_dim",
                "llama.cpp computes it as hidden_size / num_attention_heads".to_owned(),
            );
        }
        let activation =
            ["hidden_activation", "hidden_act"].into_iter().find(|key| config.get(key).is_some());
        let expected = self.activation();
        if let Some(key) = activation
            && config.text(key)? != expected
        {
            return refuse(key, format!("llama.cpp computes `{expected}` for this family"));
        }
        self.check_mixture(decoder)?;
        self.check_gemma4(decoder)?;
        if let Some(linear) = decoder.linear_attention
            && linear.key_dim != linear.value_dim
        {
            return refuse(
                "linear_value_head_dim",
                format!("llama.cpp computes square states, of `linear_key_head_dim` = {}", linear.key_dim),
            );
        }
        if self.has_linear_layers && full_attention_interval(decoder).is_none() {
            return refuse(
                "layer_types",
                "llama.cpp takes every n-th layer as one that attends in full, and all others as linear"
                    .to_owned(),
            );
        }
        if let Some(period) = self.period {
            self.check_layers(config, &sizes, period)?;
        }
        // Of a Gemma 4 it may be the images' alone.
        if !self.is_gemma4 && config.flag("use_bidirectional_attention", false)? {
            return refuse(
                "use_bidirectional_attention",
                "llama.cpp generates with causal attention".to_owned(),
            );
        }
        let caps = [
            ("attn_logit_softcapping", decoder.attn_logit_softcapping),
            ("final_logit_softcapping", decoder.final_logit_softcapping),
        ];
        if let Some((key, _)) = caps.into_iter().find(|(_, cap)| self.softcaps.is_some() && cap.is_none()) {
            return Err(unsupported(
                format!("`{key}` of a `{}`", self.model_type),
                "null",
                "llama.cpp always caps the scores and the logits of this family",
            ));
        }
        if let Some(scalar) = decoder.query_pre_attn_scalar {
            let expected = self.query_scalar(sizes.layers, sizes.hidden, sizes.heads, sizes.head_dim);
            if scalar != expected as f64 {
                return refuse("query_pre_attn_scalar", format!("llama.cpp takes {expected} for this model"));
            }
        }
        if self.has_query_key_norms() && config.optional_number("attn_logit_softcapping")?.is_some() {
            return refuse("attn_logit_softcapping", "llama.cpp has none for this family".to_owned());
        }
        Ok(())
    }

    /// Refuses a Gemma 4 that llama.cpp would compute differently.
    fn check_gemma4(&self, decoder: &DecoderConfig) -> Result<()> {
        let Some(gemma4) = decoder.gemma4 else { return Ok(()) };
        let refuse = |key: &str, value: String, remedy: &str| {
            Err(unsupported(format!("`{key}` of a `{}`", self.model_type), value, remedy.to_owned()))
        };
        let layers = usize::try_from(decoder.num_hidden_layers).unwrap_or(0);
        let is_sliding = |layer: usize| decoder.window(layer).is_some();
        if !(0..layers).any(is_sliding) {
            return refuse(
                "layer_types",
                "without a sliding_attention layer".to_owned(),
                "llama.cpp expects one of this family",
            );
        }
        let first = layers - usize::try_from(gemma4.shared_layers).unwrap_or(0).min(layers);
        let ends_as_expected = first >= 2 && is_sliding(first - 2) && !is_sliding(first - 1);
        if first < layers && !ends_as_expected {
            return refuse(
                "num_kv_shared_layers",
                gemma4.shared_layers.to_string(),
                "llama.cpp takes the keys of the last two layers before these, and expects the first of the two to have a window and the \
                 second to have none",
            );
        }
        if gemma4.per_layer_input > 0 && gemma4.per_layer_vocabulary != decoder.vocab_size {
            return refuse(
                "vocab_size_per_layer_input",
                gemma4.per_layer_vocabulary.to_string(),
                "llama.cpp expects as many rows as `vocab_size`",
            );
        }
        Ok(())
    }

    /// Refuses mixtures that llama.cpp would compute differently.
    fn check_mixture(&self, decoder: &DecoderConfig) -> Result<()> {
        let Some(mixture) = &decoder.mixture else { return Ok(()) };
        let refuse = |key: &str, value: String, remedy: &str| {
            Err(unsupported(format!("`{key}` of a `{}`", self.model_type), value, remedy.to_owned()))
        };
        if !mixture.normalizes {
            return refuse(
                "norm_topk_prob",
                "false".to_owned(),
                "llama.cpp divides the weights of a token's experts by their sum",
            );
        }
        let layers = usize::try_from(decoder.num_hidden_layers).unwrap_or(0);
        if decoder.mixture_layers() < layers {
            return refuse(
                if mixture.step == 1 { "mlp_only_layers" } else { "decoder_sparse_step" },
                format!("with which {} of {layers} layers have experts", decoder.mixture_layers()),
                "llama.cpp expects experts in every layer of this family",
            );
        }
        if let Some(clamped) = mixture.clamped
            && clamped != ClampedSwiglu::default()
        {
            let ClampedSwiglu { alpha, limit } = ClampedSwiglu::default();
            return refuse(
                "swiglu_alpha` and `swiglu_limit",
                format!("{} and {}", clamped.alpha, clamped.limit),
                &format!("llama.cpp computes {alpha} and {limit}"),
            );
        }
        if self.has_sinks && !decoder.attention_bias {
            return refuse(
                "attention_bias",
                "false".to_owned(),
                "llama.cpp reads biases of this family's attention",
            );
        }
        Ok(())
    }

    /// Compares the layers' kinds with llama.cpp's, which has their pattern as a constant.
    fn check_layers(&self, config: &Fields, sizes: &Sizes, period: u32) -> Result<()> {
        let has_windows = self.is_gemma || self.has_sinks;
        let (key, regular): (&str, fn(&Value) -> bool) = match has_windows {
            true => ("layer_types", |value| value == "sliding_attention"),
            false => ("no_rope_layers", |value| value == 1),
        };
        let refuse = |key: &str, value: String| {
            let remedy = format!("llama.cpp takes every {period}th layer as the other kind");
            Err(unsupported(format!("`{key}` of a `{}`", self.model_type), value, remedy))
        };
        if has_windows && config.fields.get("sliding_window").is_some_and(Value::is_null) {
            return refuse("sliding_window", "null, with which all layers attend to everything".to_owned());
        }
        if let Some(Value::Array(layers)) = config.get(key) {
            let as_expected = layers.len() == sizes.layers as usize
                && (1u32..)
                    .zip(layers)
                    .all(|(number, layer)| regular(layer) != number.is_multiple_of(period));
            return match as_expected {
                true => Ok(()),
                false => refuse(key, Value::Array(layers.clone()).to_string()),
            };
        }
        // A file without the list implies it by a number; Gemma 2 has none.
        let keys: &[&str] = match (has_windows, self.has_query_key_norms()) {
            (true, true) => &["sliding_window_pattern"],
            (true, false) => &[],
            (false, _) => &["no_rope_layer_interval"],
        };
        let Some(key) = keys.iter().find(|key| config.get(key).is_some()) else { return Ok(()) };
        let every = config.size(key)?;
        let differs = |number: u32| number.is_multiple_of(every) != number.is_multiple_of(period);
        match (1..=sizes.layers as u32).any(differs) {
            true => refuse(key, every.to_string()),
            false => Ok(()),
        }
    }

    /// Returns notes on parts of the model that llama.cpp leaves out.
    pub(crate) fn notes(&self, config: &Fields) -> Result<Vec<String>> {
        let mut notes = Vec::new();
        let window = config.optional_size("sliding_window")?;
        let is_optional = self.windows == Windows::Optional;
        let is_used = !is_optional || config.flag("use_sliding_window", false)?;
        if let Some(window) = window.filter(|_| is_used && !self.is_gemma && !self.has_sinks)
            && config.optional_size("max_position_embeddings")?.is_none_or(|context| window < context)
        {
            notes.push(format!(
                "llama.cpp has no sliding window for `{}`: beyond {window} tokens of context its results differ",
                self.model_type
            ));
        }
        if let Some(original) = config.optional_size("original_max_position_embeddings")?
            && original < config.size("max_position_embeddings")?
        {
            notes.push(format!(
                "llama.cpp takes the long factors of the rotary embedding for a context size above {original} tokens; transformers \
                 does so for a text above it"
            ));
        }
        Ok(notes)
    }
}

/// Returns n if every n-th layer attends in full and all others have linear attention; `None` for another order.
pub(crate) fn full_attention_interval(decoder: &DecoderConfig) -> Option<u64> {
    let layers = usize::try_from(decoder.num_hidden_layers).ok()?;
    let first = (0..layers).find(|&layer| !decoder.is_linear(layer)).unwrap_or(layers);
    let as_expected = |layer: usize| decoder.is_linear(layer) != (layer + 1).is_multiple_of(first + 1);
    (0..layers).all(as_expected).then_some(first as u64 + 1)
}

/// Reads the options of a configuration, except its rotary embedding and its activation.
pub(crate) fn decoder(config: &Fields) -> Result<DecoderConfig> {
    let wrong = |reason: String| file_error(&config.path, reason);
    let text = serde_json::to_string(&config.fields).map_err(|cause| wrong(cause.to_string()))?;
    DecoderConfig::sizes_from_str(&text).map_err(|cause| wrong(cause.to_string()))
}

/// Returns the shape of a tensor of the files; `None` for the norms of q and k of all heads, which have several sizes.
pub(crate) fn tensor_shape(decoder: &DecoderConfig, name: &str) -> Option<Vec<u64>> {
    if decoder.gemma4.is_some() {
        // Its layers differ.
        let short = name.strip_prefix("model.").unwrap_or(name);
        let own = decoder.shapes().into_iter().find(|(known, _)| known == short);
        return own.map(|(_, shape)| shape.into_iter().map(i64::unsigned_abs).collect());
    }
    let sizes = &decoder.sizes();
    if let (Some(linear), Some((_, tensor))) = (sizes.linear, of_linear_attention(name)) {
        match tensor {
            "conv1d.weight" => return Some(vec![linear.channels()?, 1, linear.window]),
            "A_log" | "dt_bias" => return Some(vec![linear.value_heads]),
            "norm.weight" => return Some(vec![linear.value]),
            _ => {}
        }
    }
    if let Some((_, tensor)) = MixtureTensor::parse(sizes.family, name) {
        return tensor.shape(sizes);
    }
    if name.ends_with(SINKS) {
        return Some(vec![sizes.heads]);
    }
    let (module, kind) = name.rsplit_once('.')?;
    let mut projections = sizes.family.projections().iter().chain(sizes.family.linear_projections());
    let projection = projections.find(|projection| module.ends_with(projection.name));
    let (rows, columns) = match (projection, module.rsplit('.').next()?) {
        (Some(projection), _) => (sizes.width(projection.output)?, sizes.width(projection.input)?),
        (None, "embed_tokens" | "lm_head") => (sizes.vocabulary, sizes.hidden),
        (None, "q_norm" | "k_norm") => {
            let is_per_head = sizes.family.facts().query_key_norm == QueryKeyNorm::PerHead;
            return is_per_head.then(|| vec![sizes.head_dim]);
        }
        _ => return Some(vec![sizes.hidden]),
    };
    Some(if kind == "bias" { vec![rows] } else { vec![rows, columns] })
}
