//! The shapes of a model's tensors and its parameter count, computed without allocating anything.

use crate::config::DecoderConfig;
use crate::family::{NormPlacement, QueryKeyNorm};

/// The name of the embedding's tensor, without Hugging Face's `model.`.
pub const EMBEDDING: &str = "embed_tokens.weight";
/// The name of the head's tensor.
pub const LM_HEAD: &str = "lm_head.weight";

type Shapes = Vec<(&'static str, Vec<i64>)>;

/// Adds projections: the weight's and the bias's name, whether there is a bias, and the widths of input and output.
fn push(shapes: &mut Shapes, list: &[(&'static str, &'static str, bool, i64, i64)]) {
    for &(weight, bias, has_bias, from, to) in list {
        shapes.push((weight, vec![to, from]));
        if has_bias {
            shapes.push((bias, vec![to]));
        }
    }
}

impl DecoderConfig {
    /// Returns the names (without Hugging Face's `model.`) and shapes of every tensor, in the order of
    /// `models::state_dict`. A tied head shares the embedding's tensor and is not listed again.
    pub fn shapes(&self) -> Vec<(String, Vec<i64>)> {
        let of_block = self.block_shapes();
        let blocks = (0..self.num_hidden_layers).flat_map(|index| {
            of_block.iter().map(move |(name, shape)| (format!("layers.{index}.{name}"), shape.clone()))
        });
        let ends = self.end_shapes().into_iter().map(|(name, shape)| (name.to_owned(), shape));
        let embedding = (EMBEDDING.to_owned(), vec![self.vocab_size, self.hidden_size]);
        std::iter::once(embedding).chain(blocks).chain(ends).collect()
    }

    /// Returns the number of parameters, a tied head once: 494 032 768 for Qwen2.5-0.5B. Saturates at `u64::MAX`.
    pub fn parameter_count(&self) -> u64 {
        let size = |size: i64| u64::try_from(size).unwrap_or(0);
        let numbers =
            |shape: &[i64]| shape.iter().fold(1, |product: u64, &n| product.saturating_mul(size(n)));
        let sum =
            |shapes: Shapes| shapes.iter().fold(0, |sum: u64, (_, shape)| sum.saturating_add(numbers(shape)));
        let blocks = sum(self.block_shapes()).saturating_mul(size(self.num_hidden_layers));
        let embedding = numbers(&[self.vocab_size, self.hidden_size]);
        embedding.saturating_add(blocks).saturating_add(sum(self.end_shapes()))
    }

    /// Returns the name (without Hugging Face's `model.`) and `[in, out]` of every projection of the blocks, and of a head that is
    /// not tied.
    pub fn projections(&self) -> Vec<(String, [i64; 2])> {
        let all = self.shapes().into_iter().filter(|(name, _)| name != EMBEDDING);
        let matrix = |(name, shape): (String, Vec<i64>)| match shape[..] {
            [out, inner] => Some((name.strip_suffix(".weight")?.to_owned(), [inner, out])),
            _ => None,
        };
        all.filter_map(matrix).collect()
    }

    fn block_shapes(&self) -> Shapes {
        let (d, f) = (self.hidden_size, self.intermediate_size);
        let queries = self.num_attention_heads.saturating_mul(self.head_dim);
        let keys = self.num_key_value_heads.saturating_mul(self.head_dim);
        let (qkv, output, mlp) = (self.qkv_bias(), self.output_bias(), self.mlp_bias);
        let joint = self.family.facts().has_joint_projections;
        let mut shapes = Shapes::new();
        if joint {
            let all = queries.saturating_add(keys.saturating_mul(2));
            push(&mut shapes, &[("self_attn.qkv_proj.weight", "", false, d, all)]);
        } else {
            push(
                &mut shapes,
                &[
                    ("self_attn.q_proj.weight", "self_attn.q_proj.bias", qkv, d, queries),
                    ("self_attn.k_proj.weight", "self_attn.k_proj.bias", qkv, d, keys),
                    ("self_attn.v_proj.weight", "self_attn.v_proj.bias", qkv, d, keys),
                ],
            );
        }
        push(&mut shapes, &[("self_attn.o_proj.weight", "self_attn.o_proj.bias", output, queries, d)]);
        let norms = match self.family.facts().query_key_norm {
            QueryKeyNorm::None => None,
            QueryKeyNorm::PerHead => Some([self.head_dim; 2]),
            QueryKeyNorm::Whole => Some([queries, keys]),
        };
        if let Some([of_queries, of_keys]) = norms {
            shapes.push(("self_attn.q_norm.weight", vec![of_queries]));
            shapes.push(("self_attn.k_norm.weight", vec![of_keys]));
        }
        if joint {
            push(&mut shapes, &[("mlp.gate_up_proj.weight", "", false, d, f.saturating_mul(2))]);
        } else {
            push(
                &mut shapes,
                &[
                    ("mlp.gate_proj.weight", "mlp.gate_proj.bias", mlp, d, f),
                    ("mlp.up_proj.weight", "mlp.up_proj.bias", mlp, d, f),
                ],
            );
        }
        push(&mut shapes, &[("mlp.down_proj.weight", "mlp.down_proj.bias", mlp, f, d)]);
        let names: &[&'static str] = match self.family.facts().norms {
            NormPlacement::Pre => &["input_layernorm.weight", "post_attention_layernorm.weight"],
            NormPlacement::Post => &["post_attention_layernorm.weight", "post_feedforward_layernorm.weight"],
            NormPlacement::Both => &[
                "input_layernorm.weight",
                "post_attention_layernorm.weight",
                "pre_feedforward_layernorm.weight",
                "post_feedforward_layernorm.weight",
            ],
        };
        shapes.extend(names.iter().map(|&name| (name, vec![d])));
        shapes
    }

    fn end_shapes(&self) -> Shapes {
        let head = (!self.tie_word_embeddings).then(|| (LM_HEAD, vec![self.vocab_size, self.hidden_size]));
        std::iter::once(("norm.weight", vec![self.hidden_size])).chain(head).collect()
    }
}
