//! Shapes of models with random weights, for measurements that do not depend on the weights' values.

use models::LlamaConfig;

/// Returns Qwen2.5-0.5B's shape with other numbers of layers and tokens.
pub(crate) fn small(layers: i64, vocabulary: i64, longest: i64) -> LlamaConfig {
    LlamaConfig {
        num_key_value_heads: 2,
        tie_word_embeddings: true,
        max_position_embeddings: longest,
        ..LlamaConfig::qwen2(vocabulary, 896, 4864, layers, 14)
    }
}

/// Returns Qwen2.5-7B's shape with other numbers of layers and tokens.
pub(crate) fn large(layers: i64, vocabulary: i64, longest: i64) -> LlamaConfig {
    LlamaConfig {
        num_key_value_heads: 4,
        tie_word_embeddings: false,
        max_position_embeddings: longest,
        ..LlamaConfig::qwen2(vocabulary, 3584, 18_944, layers, 28)
    }
}

/// A model for quick checks.
pub(crate) fn tiny(layers: i64, longest: i64) -> LlamaConfig {
    LlamaConfig {
        num_key_value_heads: 2,
        tie_word_embeddings: true,
        max_position_embeddings: longest,
        ..LlamaConfig::qwen2(512, 128, 384, layers, 4)
    }
}
