//! The metadata that llama.cpp reads for an architecture.

use decoder::Sizes;

use super::family::Family;
use crate::error::Result;
use crate::json::Fields;
use crate::value::Value;

/// Returns the keys of sizes, norms and scales; those of the rotary embedding are in `rope`.
pub(super) fn keys(config: &Fields, family: &Family, sizes: &Sizes) -> Result<Vec<(String, Value)>> {
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
    let number = |key: &str, default: f64| {
        Ok::<_, crate::Error>(float(config.optional_number(key)?.unwrap_or(default)))
    };
    match family.model_type {
        "granite" => keys.extend([
            ("attention.scale", number("attention_multiplier", 1.0)?),
            ("embedding_scale", number("embedding_multiplier", 1.0)?),
            ("residual_scale", number("residual_multiplier", 1.0)?),
            ("logit_scale", number("logits_scaling", 1.0)?),
        ]),
        "gemma2" => keys.extend([
            ("attn_logit_softcapping", number("attn_logit_softcapping", 50.0)?),
            ("final_logit_softcapping", number("final_logit_softcapping", 30.0)?),
            ("attention.sliding_window", config.optional_size("sliding_window")?.unwrap_or(4096).into()),
        ]),
        "gemma3_text" => {
            keys.push((
                "attention.sliding_window",
                config.optional_size("sliding_window")?.unwrap_or(4096).into(),
            ));
            if let Some(cap) = config.optional_number("final_logit_softcapping")? {
                keys.push(("final_logit_softcapping", float(cap)));
            }
        }
        // llama.cpp distinguishes Phi-3 and Phi-4 by this key's presence.
        "phi3" => keys
            .push(("attention.sliding_window", config.optional_size("sliding_window")?.unwrap_or(0).into())),
        _ => {}
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
