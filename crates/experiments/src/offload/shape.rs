//! Models of real shapes with random weights, for measurements that do not depend on what the weights say.

use models::LlamaConfig;

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
