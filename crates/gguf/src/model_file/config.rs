//! `config.json` of a file: the inverse of `model::keys`.

use decoder::{AttentionBias, Windows};
use serde_json::{Map, Value as Json, json};

use super::gemma4::Layers;
use super::metadata::{Metadata, integers, missing};
use super::rope;
use crate::error::{Result, file_error, unsupported};
use crate::model::Family;
use crate::value::{Array, Value};

/// Shapes of tensors by their names in the file, and the few values that a configuration follows from.
pub(super) trait Tensors {
    fn count(&self) -> u64;

    fn shape(&self, name: &str) -> Option<&[u64]>;

    fn vector(&self, name: &str) -> Result<Option<Vec<f32>>>;
}

/// Returns the fields of `config.json`.
///
/// # Errors
/// Missing keys; options that no configuration of the family has.
pub(super) fn config(
    metadata: &Metadata<'_>,
    family: &Family,
    tensors: &dyn Tensors,
    tied: bool,
) -> Result<Map<String, Json>> {
    refuse_others(metadata, family)?;
    let embedding = tensors.shape("token_embd.weight");
    let vocabulary = embedding.and_then(|shape| shape.first().copied());
    let vocabulary = vocabulary
        .ok_or_else(|| missing(metadata.path, "token_embd.weight", "the embedding, `[tokens, hidden]`"))?;
    let (hidden, layers) = (metadata.size("embedding_length")?, metadata.size("block_count")?);
    // A layer has several tensors, so this bounds what is made for each layer.
    if layers > tensors.count() {
        let reason = format!(
            "`{}.block_count` is {layers}, but the file has {} tensors; get the file again",
            metadata.architecture,
            tensors.count()
        );
        return Err(file_error(metadata.path, reason));
    }
    let heads = metadata.size("attention.head_count")?;
    let facts = family.kind.facts();
    let of_layers = facts.is_gemma4.then(|| Layers::read(metadata, layers, heads)).transpose()?;
    let (head_dim, kv_heads) = match &of_layers {
        Some(of_layers) => (of_layers.head_dim, of_layers.kv_heads),
        None => (
            metadata.optional_size("attention.key_length")?.unwrap_or(hidden / heads),
            metadata.optional_size("attention.head_count_kv")?.unwrap_or(heads),
        ),
    };
    let mut config = json!({
        "architectures": [facts.architecture],
        "model_type": facts.model_type,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.size("context_length")?,
        "rms_norm_eps": metadata.float("attention.layer_norm_rms_epsilon")?,
        "tie_word_embeddings": tied,
    });
    let mut put = |key: &str, value: Json| config[key] = value;
    if facts.has_experts {
        for (key, value) in mixture(metadata, family)? {
            put(key, value);
        }
    } else {
        let width = of_layers.as_ref().map(|of_layers| Ok(of_layers.feed_forward));
        put("intermediate_size", width.unwrap_or_else(|| metadata.size("feed_forward_length"))?.into());
    }
    for (role, name) in [("bos", "bos"), ("eos", "eos"), ("pad", "padding")] {
        if let Some(token) = metadata.token(name) {
            put(&format!("{role}_token_id"), token.into());
        }
    }
    if matches!(facts.attention_bias, AttentionBias::Configured | AttentionBias::UnlessFalse) {
        put("attention_bias", tensors.shape("blk.0.attn_output.bias").is_some().into());
    }
    if facts.reads_mlp_bias {
        put("mlp_bias", tensors.shape("blk.0.ffn_down.bias").is_some().into());
    }
    put(if family.is_gemma { "hidden_activation" } else { "hidden_act" }, family.activation().into());
    if family.is_gemma {
        if of_layers.is_none() {
            put("query_pre_attn_scalar", family.query_scalar(layers, hidden, heads, head_dim).into());
        }
        // 0 is none.
        let cap = metadata.optional_float("final_logit_softcapping")?.filter(|cap| *cap != 0.0);
        put("final_logit_softcapping", cap.into());
    }
    if facts.softcaps.is_some() {
        put("attn_logit_softcapping", metadata.optional_float("attn_logit_softcapping")?.into());
    }
    if facts.windows == Windows::Configured {
        let window = metadata.optional_size("attention.sliding_window")?;
        put("sliding_window", window.filter(|window| *window > 0).into());
    }
    if facts.has_linear_layers {
        for (key, value) in linear_attention(metadata)? {
            put(key, value);
        }
        put("attn_output_gate", true.into());
    }
    if let Some(types) = layer_types(metadata, family, layers)? {
        put(if has_windows(family) { "layer_types" } else { "no_rope_layers" }, types);
    }
    if facts.has_multipliers {
        let number = |key, default: f64| Ok(metadata.optional_float(key)?.unwrap_or(default));
        put("attention_multiplier", number("attention.scale", 1.0 / (head_dim as f64).sqrt())?.into());
        put("embedding_multiplier", number("embedding_scale", 1.0)?.into());
        put("residual_multiplier", number("residual_scale", 1.0)?.into());
        put("logits_scaling", number("logit_scale", 1.0)?.into());
    }
    if let Some(of_layers) = &of_layers {
        for (key, value) in of_layers.fields(metadata, tensors, vocabulary)? {
            put(key, value);
        }
        return Ok(config.as_object().cloned().unwrap_or_default());
    }
    let rotated = metadata.optional_size("rope.dimension_count")?.unwrap_or(head_dim);
    for (key, value) in rope::fields(metadata, family, tensors, (rotated, head_dim))? {
        put(&key, value);
    }
    Ok(config.as_object().cloned().unwrap_or_default())
}

/// The sizes of a mixture.
fn mixture(metadata: &Metadata<'_>, family: &Family) -> Result<Vec<(&'static str, Json)>> {
    let inner = metadata.size("expert_feed_forward_length")?;
    let mut fields = vec![
        ("num_local_experts", metadata.size("expert_count")?.into()),
        ("num_experts_per_tok", metadata.size("expert_used_count")?.into()),
    ];
    if family.has_clamped_experts {
        fields.push(("intermediate_size", inner.into()));
        return Ok(fields);
    }
    fields.push(("moe_intermediate_size", inner.into()));
    if family.has_shared_expert {
        let shared = metadata.optional_size("expert_shared_feed_forward_length")?.unwrap_or(inner);
        fields.push(("shared_expert_intermediate_size", shared.into()));
    } else {
        // llama.cpp knows no other weights.
        fields.push(("norm_topk_prob", true.into()));
        fields.push((
            "intermediate_size",
            metadata.optional_size("feed_forward_length")?.unwrap_or(inner).into(),
        ));
    }
    Ok(fields)
}

/// The sizes of linear attention.
fn linear_attention(metadata: &Metadata<'_>) -> Result<Vec<(&'static str, Json)>> {
    let (heads, inner) = (metadata.size("ssm.time_step_rank")?, metadata.size("ssm.inner_size")?);
    if inner % heads != 0 {
        let reason = format!(
            "`{}.ssm.inner_size` is {inner}, which its {heads} heads do not divide; get the file again",
            metadata.architecture
        );
        return Err(file_error(metadata.path, reason));
    }
    Ok(vec![
        ("full_attention_interval", metadata.optional_size("full_attention_interval")?.unwrap_or(4).into()),
        ("linear_conv_kernel_dim", metadata.size("ssm.conv_kernel")?.into()),
        ("linear_key_head_dim", metadata.size("ssm.state_size")?.into()),
        ("linear_num_key_heads", metadata.size("ssm.group_count")?.into()),
        ("linear_num_value_heads", heads.into()),
        ("linear_value_head_dim", (inner / heads).into()),
    ])
}

/// Refuses parts that the family's models do not have.
fn refuse_others(metadata: &Metadata<'_>, family: &Family) -> Result<()> {
    let refuse = |key: &str, value: String, remedy: &str| {
        Err(unsupported(
            format!("`{}.{key}` of {}", metadata.architecture, metadata.path.display()),
            value,
            remedy,
        ))
    };
    if let Some(experts) = metadata.optional_size("expert_count")?.filter(|experts| *experts > 0)
        && !family.has_experts
    {
        return refuse("expert_count", experts.to_string(), "this family has no mixture of experts");
    }
    if let Some(layers) = metadata.optional_size("nextn_predict_layers")?.filter(|layers| *layers > 0) {
        return refuse(
            "nextn_predict_layers",
            layers.to_string(),
            "layers that predict several tokens cannot be read; get a file without them",
        );
    }
    if metadata.get("attention.recurrent_layers").is_some() {
        return refuse(
            "attention.recurrent_layers",
            "present".to_owned(),
            "a list of the layers with linear attention cannot be read, only `full_attention_interval`",
        );
    }
    let has_window = family.windows != Windows::None || family.is_gemma;
    if let Some(window) = metadata.optional_size("attention.sliding_window")?.filter(|window| *window > 0)
        && !has_window
    {
        return refuse("attention.sliding_window", window.to_string(), "this family has no window");
    }
    for key in ["attention.scale", "embedding_scale", "residual_scale", "logit_scale"] {
        if let Some(scale) = metadata.optional_float(key)?.filter(|scale| *scale != 1.0)
            && !family.has_multipliers
        {
            return refuse(key, scale.to_string(), "this family has no such factor");
        }
    }
    Ok(())
}

/// Whether the layers that differ are those without a window.
fn has_windows(family: &Family) -> bool {
    family.is_gemma || family.has_sinks
}

/// The kinds of layers of a family whose every n-th layer differs: `layer_types` of a Gemma and of gpt-oss, `no_rope_layers` of SmolLM3.
fn layer_types(metadata: &Metadata<'_>, family: &Family, layers: u64) -> Result<Option<Json>> {
    let Some(period) = family.period else { return Ok(None) };
    if !has_windows(family) {
        let rotates: Vec<u64> =
            (1..=layers).map(|number| u64::from(!number.is_multiple_of(period.into()))).collect();
        return Ok(Some(rotates.into()));
    }
    let pattern = metadata.get("attention.sliding_window_pattern");
    let is_sliding: Vec<bool> = match pattern {
        Some(Value::Array(Array::Bool(list))) if list.len() as u64 == layers => list.clone(),
        other => {
            let period = match other.map(integers) {
                None => period.into(),
                Some(Some(list)) if matches!(list[..], [1..=u64::MAX]) => list[0],
                Some(_) => {
                    return Err(unsupported(
                        format!("`{}.attention.sliding_window_pattern`", metadata.architecture),
                        format!("{pattern:?}"),
                        "a period, or true and false for each layer, can be read",
                    ));
                }
            };
            (1..=layers).map(|number| !number.is_multiple_of(period)).collect()
        }
    };
    let name = |sliding: bool| if sliding { "sliding_attention" } else { "full_attention" };
    Ok(Some(is_sliding.into_iter().map(name).collect::<Vec<_>>().into()))
}
