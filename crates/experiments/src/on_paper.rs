//! A model's shape as `accounting` takes it.

use accounting::model::{Decoder, Family, Shape};
use anyhow::Context;
use models::{LlamaConfig, llama};

/// The decoder of a configuration, on paper.
///
/// # Errors
/// A shape that is none.
pub(crate) fn decoder(config: &LlamaConfig) -> anyhow::Result<Decoder> {
    let size = |n: i64| u64::try_from(n).context("a size below 0");
    Ok(Decoder::new(Shape {
        family: match config.family {
            llama::Family::Llama => Family::Llama,
            llama::Family::Qwen2 => Family::Qwen2,
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
    })?)
}
