//! The tensors of a Gemma 4, whose layers differ.

use super::{Shape, saturating_sum};
use crate::config::{DecoderConfig, Gemma4};
use crate::tensors::{
    BiasOption, LAYER_SCALAR, PER_LAYER_EMBEDDING, PER_LAYER_GATE, PER_LAYER_MODEL_PROJECTION,
    PER_LAYER_NORM, PER_LAYER_PROJECTION, POST_PER_LAYER_NORM,
};

impl DecoderConfig {
    /// The tensors of the second embedding, between the first and the blocks; none for a model without one.
    pub(super) fn per_layer_shapes(&self) -> Vec<Shape> {
        let Some(Gemma4 { per_layer_input, per_layer_vocabulary, .. }) =
            self.gemma4.filter(|gemma4| gemma4.per_layer_input > 0)
        else {
            return Vec::new();
        };
        let all = self.num_hidden_layers.saturating_mul(per_layer_input);
        [
            (PER_LAYER_EMBEDDING, vec![per_layer_vocabulary, all]),
            (PER_LAYER_MODEL_PROJECTION, vec![all, self.hidden_size]),
            (PER_LAYER_NORM, vec![per_layer_input]),
        ]
        .into_iter()
        .map(|(name, shape)| (format!("{name}.weight"), shape))
        .collect()
    }

    /// The tensors of a layer's block.
    pub(super) fn gemma4_block_shapes(&self, layer: usize) -> Vec<Shape> {
        let (hidden, head) = (self.hidden_size, self.layer_head_dim(layer));
        let queries = self.num_attention_heads.saturating_mul(head);
        let keys = self.layer_kv_heads(layer).saturating_mul(head);
        let inner = self.layer_intermediate_size(layer);
        let has_keys = self.key_layer(layer) == layer;
        let has_input_bias = self.has_bias(BiasOption::QueriesKeysValues);
        let mut shapes = Vec::new();
        let mut projection = |name: &str, [out, inner]: [i64; 2], has_bias: bool| {
            shapes.push((format!("{name}.weight"), vec![out, inner]));
            if has_bias {
                shapes.push((format!("{name}.bias"), vec![out]));
            }
        };
        projection("self_attn.q_proj", [queries, hidden], has_input_bias);
        if has_keys {
            projection("self_attn.k_proj", [keys, hidden], has_input_bias);
        }
        if self.has_value_projection(layer) {
            projection("self_attn.v_proj", [keys, hidden], has_input_bias);
        }
        projection("self_attn.o_proj", [hidden, queries], self.has_bias(BiasOption::AttentionOutput));
        let norm = |name: &str, width: i64| (format!("{name}.weight"), vec![width]);
        shapes.push(norm("self_attn.q_norm", head));
        if has_keys {
            shapes.push(norm("self_attn.k_norm", head));
        }
        for (name, shape) in
            [("gate_proj", [inner, hidden]), ("up_proj", [inner, hidden]), ("down_proj", [hidden, inner])]
        {
            shapes.push((format!("mlp.{name}.weight"), shape.to_vec()));
        }
        shapes.extend(self.family.norm_names().iter().map(|name| norm(name, hidden)));
        if let Some(width) = self.gemma4.map(|gemma4| gemma4.per_layer_input).filter(|&width| width > 0) {
            shapes.push((format!("{PER_LAYER_GATE}.weight"), vec![width, hidden]));
            shapes.push((format!("{PER_LAYER_PROJECTION}.weight"), vec![hidden, width]));
            shapes.push(norm(POST_PER_LAYER_NORM, hidden));
        }
        shapes.push((LAYER_SCALAR.to_owned(), vec![1]));
        shapes
    }

    /// The number of parameters of all blocks and of the second embedding.
    pub(super) fn gemma4_parameters(&self) -> u64 {
        let layers = 0..usize::try_from(self.num_hidden_layers).unwrap_or(0);
        let of_layer = |layer| {
            let shapes = self.gemma4_block_shapes(layer).into_iter();
            saturating_sum(shapes.filter(|(name, _)| name != LAYER_SCALAR))
        };
        let blocks = layers.map(of_layer).fold(0, u64::saturating_add);
        blocks.saturating_add(saturating_sum(self.per_layer_shapes().into_iter()))
    }
}
