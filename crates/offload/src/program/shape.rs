//! Models of real shapes with random weights, for measurements that do not depend on what the weights say.

use accounting::model::{Decoder, Family};
use anyhow::Context;
use models::{LlamaConfig, llama};

/// Qwen2.5-0.5B with so many layers and words: its blocks are the real ones.
pub(crate) fn small(layers: i64, vocabulary: i64, longest: i64) -> LlamaConfig {
    LlamaConfig {
        num_key_value_heads: 2,
        tie_word_embeddings: true,
        max_position_embeddings: longest,
        ..LlamaConfig::qwen2(vocabulary, 896, 4864, layers, 14)
    }
}

/// Qwen2.5-7B with so many layers and words.
pub(crate) fn large(layers: i64, vocabulary: i64, longest: i64) -> LlamaConfig {
    LlamaConfig {
        num_key_value_heads: 4,
        tie_word_embeddings: false,
        max_position_embeddings: longest,
        ..LlamaConfig::qwen2(vocabulary, 3584, 18_944, layers, 28)
    }
}

/// Something that runs in no time.
pub(crate) fn tiny(layers: i64, longest: i64) -> LlamaConfig {
    LlamaConfig {
        num_key_value_heads: 2,
        tie_word_embeddings: true,
        max_position_embeddings: longest,
        ..LlamaConfig::qwen2(512, 128, 384, layers, 4)
    }
}

/// The same model on paper.
///
/// # Errors
/// A shape that is none.
pub(crate) fn on_paper(config: &LlamaConfig) -> anyhow::Result<Decoder> {
    let size = |n: i64| u64::try_from(n).context("a size below 0");
    Ok(Decoder::new(accounting::model::Shape {
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
