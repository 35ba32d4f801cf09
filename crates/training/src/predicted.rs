//! Converts a model's configuration for `accounting`.

use accounting::Decoder;
use accounting::model::{Family, Shape, Windows};
use models::{LlamaConfig, llama};

use crate::error::{Error, Result};

/// Returns the sizes of a model, from which [`accounting`] predicts parameters, FLOPs and bytes.
///
/// ```
/// use models::LlamaConfig;
/// use training::predicted;
///
/// let config = LlamaConfig::qwen2(1000, 64, 128, 2, 4);
/// assert_eq!(predicted::decoder(&config)?.parameters()?, config.parameter_count());
/// # Ok::<(), training::Error>(())
/// ```
///
/// # Errors
/// A negative size; sizes that contradict each other.
pub fn decoder(config: &LlamaConfig) -> Result<Decoder> {
    let size = |n: i64| {
        u64::try_from(n).map_err(|_| Error::config("model", format!("a size is {n}; expected at least 1")))
    };
    let model = Decoder::new(Shape {
        family: match config.family {
            llama::Family::Llama => Family::Llama,
            llama::Family::Qwen2 => Family::Qwen2,
            llama::Family::Qwen3 => Family::Qwen3,
            llama::Family::Mistral => Family::Mistral,
            llama::Family::SmolLm3 => Family::SmolLm3,
            llama::Family::Granite => Family::Granite,
            llama::Family::Olmo2 => Family::Olmo2,
            llama::Family::Gemma3 => Family::Gemma3,
            llama::Family::Gemma2 => Family::Gemma2,
            llama::Family::Phi3 => Family::Phi3,
        },
        vocabulary: size(config.vocab_size)?,
        context: size(config.max_position_embeddings)?,
        embedding: size(config.hidden_size)?,
        hidden: size(config.hidden_size)?,
        layers: size(config.num_hidden_layers)?,
        heads: size(config.num_attention_heads)?,
        kv_heads: size(config.num_key_value_heads)?,
        head_dim: size(config.head_dim)?,
        feed_forward: size(config.intermediate_size)?,
        tied: config.tie_word_embeddings,
        attention_bias: config.attention_bias,
        mlp_bias: config.mlp_bias,
    })?;
    let layers = usize::try_from(config.num_hidden_layers).unwrap_or(0);
    let windowed = (0..layers).filter(|&layer| config.window(layer).is_some()).count() as u64;
    Ok(match config.sliding_window {
        Some(window) => model.with_windows(Windows { layers: windowed, tokens: size(window)? })?,
        None => model,
    })
}
