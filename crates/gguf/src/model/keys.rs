//! The metadata that llama.cpp reads for an architecture.

use decoder::DecoderConfig;

use super::family::{Family, full_attention_interval};
use crate::error::Result;
use crate::json::Fields;
use crate::value::{Array, Value};

/// Returns the keys of sizes, norms and scales; those of the rotary embedding are in `rope`.
pub(super) fn keys(
    config: &Fields,
    family: &Family,
    decoder: &DecoderConfig,
) -> Result<Vec<(String, Value)>> {
    let sizes = decoder.sizes();
    let mut keys: Vec<(&str, Value)> = vec![
        ("vocab_size", count(sizes.vocabulary)),
        ("context_length", count(sizes.context)),
        ("embedding_length", count(sizes.hidden)),
        ("block_count", count(sizes.layers)),
        ("feed_forward_length", count(sizes.feed_forward)),
        ("attention.head_count", count(sizes.heads)),
        ("attention.head_count_kv", count(sizes.kv_heads)),
        ("attention.key_length", count(sizes.head_dim)),
        ("attention.value_length", count(sizes.head_dim)),
        ("attention.layer_norm_rms_epsilon", float(config.number("rms_norm_eps")?)),
    ];
    if family.has_multipliers {
        keys.extend([
            ("attention.scale", float(decoder.attention_scale().unwrap_or(1.0))),
            ("embedding_scale", float(decoder.embedding_multiplier)),
            ("residual_scale", float(decoder.residual_multiplier)),
            ("logit_scale", float(decoder.logits_scaling)),
        ]);
    }
    if let (Some(linear), Some(interval)) = (sizes.linear, full_attention_interval(decoder)) {
        keys.extend([
            ("full_attention_interval", count(interval)),
            ("ssm.conv_kernel", count(linear.window)),
            ("ssm.state_size", count(linear.key)),
            ("ssm.group_count", count(linear.key_heads)),
            ("ssm.time_step_rank", count(linear.value_heads)),
            ("ssm.inner_size", count(linear.values().unwrap_or(u64::MAX))),
        ]);
    }
    if let Some(experts) = sizes.experts {
        keys.extend([
            ("expert_count", count(experts.count)),
            ("expert_used_count", count(experts.per_token)),
            ("expert_feed_forward_length", count(experts.feed_forward)),
        ]);
        if experts.shared > 0 {
            keys.push(("expert_shared_feed_forward_length", count(experts.shared)));
        }
    }
    if let Some(gemma4) = &decoder.gemma4 {
        let layers = 0..usize::try_from(decoder.num_hidden_layers).unwrap_or(0);
        let list = |of: &dyn Fn(usize) -> i64| {
            let sizes = layers.clone().map(|layer| u32::try_from(of(layer)).unwrap_or(u32::MAX));
            Value::Array(Array::U32(sizes.collect()))
        };
        let replaced = [
            "feed_forward_length",
            "attention.head_count_kv",
            "attention.key_length",
            "attention.value_length",
        ];
        keys.retain(|(key, _)| !replaced.contains(key));
        let full = count(u64::try_from(gemma4.global_head_dim).unwrap_or(0));
        let is_sliding = layers.clone().map(|layer| decoder.window(layer).is_some());
        keys.extend([
            ("feed_forward_length", list(&|layer| decoder.layer_intermediate_size(layer))),
            ("attention.head_count_kv", list(&|layer| decoder.layer_kv_heads(layer))),
            ("attention.key_length", full.clone()),
            ("attention.value_length", full),
            ("attention.key_length_swa", count(sizes.head_dim)),
            ("attention.value_length_swa", count(sizes.head_dim)),
            ("attention.shared_kv_layers", count(u64::try_from(gemma4.shared_layers).unwrap_or(0))),
            ("attention.sliding_window_pattern", Value::Array(Array::Bool(is_sliding.collect()))),
            ("embedding_length_per_layer_input", count(u64::try_from(gemma4.per_layer_input).unwrap_or(0))),
        ]);
        // Without a cap: llama.cpp's default is one.
        if decoder.final_logit_softcapping.is_none() {
            keys.push(("final_logit_softcapping", float(0.0)));
        }
    }
    let caps = [
        ("attn_logit_softcapping", decoder.attn_logit_softcapping),
        ("final_logit_softcapping", decoder.final_logit_softcapping),
    ];
    keys.extend(caps.into_iter().filter_map(|(key, cap)| Some((key, float(cap?)))));
    // llama.cpp distinguishes Phi-3 and Phi-4 by this key's presence.
    if family.is_gemma || family.has_long_rope || family.has_sinks {
        let window = decoder.sliding_window.and_then(|window| u64::try_from(window).ok());
        keys.push(("attention.sliding_window", count(window.unwrap_or(0))));
    }
    Ok(keys.into_iter().map(|(key, value)| (format!("{}.{key}", family.architecture), value)).collect())
}

/// Returns a size as the 32 bits that llama.cpp reads; the reader bounds each size far below 2^32.
pub(super) fn count(size: u64) -> Value {
    u32::try_from(size).unwrap_or(u32::MAX).into()
}

pub(super) fn float(number: f64) -> Value {
    Value::F32(number as f32)
}
