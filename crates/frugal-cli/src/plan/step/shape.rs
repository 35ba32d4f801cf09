//! The sizes of a model as a `config.json` has them, as far as adapters and chunks of the loss depend on them.

use accounting::Decoder;
use frugal::models::llama::{DecoderConfig, LayerType, LinearAttention, Mixture};

/// Returns the configuration of a model of these sizes.
pub(super) fn shape(model: &Decoder) -> DecoderConfig {
    let size = |size: u64| i64::try_from(size).unwrap_or(i64::MAX);
    let [vocabulary, hidden, feed_forward] = [model.vocabulary, model.hidden, model.feed_forward].map(size);
    DecoderConfig {
        family: model.family,
        num_key_value_heads: size(model.kv_heads),
        head_dim: size(model.head_dim),
        tie_word_embeddings: model.tied,
        mixture: model.experts.map(|experts| Mixture {
            experts: size(experts.count),
            per_token: size(experts.per_token),
            intermediate_size: size(experts.feed_forward),
            shared: (experts.shared > 0).then(|| size(experts.shared)),
            normalizes: true,
            step: 1,
            dense_layers: Vec::new(),
            clamped: experts.biases.then(Default::default),
        }),
        linear_attention: model.linear.map(|linear| LinearAttention {
            key_heads: size(linear.key_heads),
            value_heads: size(linear.value_heads),
            key_dim: size(linear.key),
            value_dim: size(linear.value),
            window: size(linear.window),
        }),
        layer_types: (0..if model.linear.is_some() { model.layers } else { 0 })
            .map(|layer| if model.is_linear(layer) { LayerType::Linear } else { LayerType::Full })
            .collect(),
        ..DecoderConfig::llama(vocabulary, hidden, feed_forward, size(model.layers), size(model.heads))
    }
}
