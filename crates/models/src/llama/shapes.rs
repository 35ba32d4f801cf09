//! The shapes of a model's tensors and its parameter count, computed without allocating anything.

use super::LlamaConfig;

impl LlamaConfig {
    /// Returns the names (without Hugging Face's `model.`) and shapes of every tensor, in the order of
    /// [`state_dict`](crate::state_dict::state_dict). A tied head shares the embedding's tensor and is not listed again.
    pub fn shapes(&self) -> Vec<(String, Vec<i64>)> {
        let of_block = self.block_shapes();
        let blocks = (0..self.num_hidden_layers).flat_map(|index| {
            of_block.iter().map(move |(name, shape)| (format!("layers.{index}.{name}"), shape.clone()))
        });
        let ends = self.end_shapes().into_iter().map(|(name, shape)| (name.to_owned(), shape));
        let embedding = ("embed_tokens.weight".to_owned(), vec![self.vocab_size, self.hidden_size]);
        std::iter::once(embedding).chain(blocks).chain(ends).collect()
    }

    /// Returns the number of parameters, a tied head once: 494 032 768 for Qwen2.5-0.5B. Saturates at `u64::MAX`.
    pub fn parameter_count(&self) -> u64 {
        let size = |size: i64| u64::try_from(size).unwrap_or(0);
        let numbers =
            |shape: &[i64]| shape.iter().fold(1, |product: u64, &n| product.saturating_mul(size(n)));
        let sum = |shapes: Vec<(&str, Vec<i64>)>| {
            shapes.iter().fold(0, |sum: u64, (_, shape)| sum.saturating_add(numbers(shape)))
        };
        let blocks = sum(self.block_shapes()).saturating_mul(size(self.num_hidden_layers));
        let embedding = numbers(&[self.vocab_size, self.hidden_size]);
        embedding.saturating_add(blocks).saturating_add(sum(self.end_shapes()))
    }

    fn block_shapes(&self) -> Vec<(&'static str, Vec<i64>)> {
        let (d, f) = (self.hidden_size, self.intermediate_size);
        let queries = self.num_attention_heads.saturating_mul(self.head_dim);
        let keys = self.num_key_value_heads.saturating_mul(self.head_dim);
        let (qkv, output, mlp) = (self.qkv_bias(), self.output_bias(), self.mlp_bias);
        let mut shapes = Vec::new();
        for (weight, bias, has_bias, from, to) in [
            ("self_attn.q_proj.weight", "self_attn.q_proj.bias", qkv, d, queries),
            ("self_attn.k_proj.weight", "self_attn.k_proj.bias", qkv, d, keys),
            ("self_attn.v_proj.weight", "self_attn.v_proj.bias", qkv, d, keys),
            ("self_attn.o_proj.weight", "self_attn.o_proj.bias", output, queries, d),
            ("mlp.gate_proj.weight", "mlp.gate_proj.bias", mlp, d, f),
            ("mlp.up_proj.weight", "mlp.up_proj.bias", mlp, d, f),
            ("mlp.down_proj.weight", "mlp.down_proj.bias", mlp, f, d),
        ] {
            shapes.push((weight, vec![to, from]));
            if has_bias {
                shapes.push((bias, vec![to]));
            }
        }
        shapes.push(("input_layernorm.weight", vec![d]));
        shapes.push(("post_attention_layernorm.weight", vec![d]));
        shapes
    }

    fn end_shapes(&self) -> Vec<(&'static str, Vec<i64>)> {
        let head =
            (!self.tie_word_embeddings).then(|| (super::LM_HEAD, vec![self.vocab_size, self.hidden_size]));
        std::iter::once(("norm.weight", vec![self.hidden_size])).chain(head).collect()
    }
}
