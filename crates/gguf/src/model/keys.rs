//! The metadata that llama.cpp reads of an architecture.

use super::family::{Family, Sizes};
use crate::error::Result;
use crate::json::Fields;
use crate::value::Value;

/// Returns the keys of sizes, norms and scales; those of the rotary embedding are in `rope`.
pub(super) fn of(config: &Fields, family: &Family, sizes: &Sizes) -> Result<Vec<(String, Value)>> {
    let mut keys: Vec<(&str, Value)> = vec![
        ("vocab_size", sizes.vocabulary.into()),
        ("context_length", sizes.context.into()),
        ("embedding_length", sizes.hidden.into()),
        ("block_count", sizes.layers.into()),
        ("feed_forward_length", sizes.feed_forward.into()),
        ("attention.head_count", sizes.heads.into()),
        ("attention.head_count_kv", sizes.key_value_heads.into()),
        ("attention.key_length", sizes.head_dim.into()),
        ("attention.value_length", sizes.head_dim.into()),
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
        // llama.cpp tells Phi-3 from Phi-4 by this key's presence.
        "phi3" => keys
            .push(("attention.sliding_window", config.optional_size("sliding_window")?.unwrap_or(0).into())),
        _ => {}
    }
    Ok(keys.into_iter().map(|(key, value)| (format!("{}.{key}", family.architecture), value)).collect())
}

pub(super) fn float(number: f64) -> Value {
    Value::F32(number as f32)
}
