//! The decoder of the families of Llama (Touvron et al., arXiv:2302.13971): rotary embeddings, RMS norms, a gated MLP.
//!
//! ```text
//! x = e·embed_tokens[tokens]
//! x = x + m·post(o_proj(attention(rotate(norm(q_proj(n))), rotate(norm(k_proj(n))), v_proj(n))))   n = pre(x); in each block,
//! x = x + m·post(down_proj(f(gate_proj(n)) ⊙ up_proj(n)))                                          n = pre(x)
//! logits = cap(rms(x)·lm_headᵀ/s)                                                       tied to the embedding or not
//! ```
//!
//! | family | differs in |
//! |---|---|
//! | Llama, SmolLM2 | nothing: pre is an RMS norm, post and norm are nothing, f is SiLU, e = m = s = 1 |
//! | Qwen2 (arXiv:2407.10671) | biases of queries, keys and values |
//! | Qwen3 (arXiv:2505.09388) | norm is an RMS norm of each head, without biases |
//! | Qwen3-MoE | as Qwen3, with a mixture of experts as the MLP ([`SparseMlp`](crate::SparseMlp)) |
//! | Qwen3.5 | norms multiply by 1 + w; in most layers gated DeltaNet instead of attention, in the others a gate σ for each head's output and rotation of a part of each head |
//! | Qwen3.5-MoE | as Qwen3.5, with a mixture of experts and a shared expert as the MLP |
//! | gpt-oss (arXiv:2508.10925) | biases, a [sink](crate::attention#sinks) for each head, a window in every other layer, and a mixture of experts with biases |
//! | Mistral (arXiv:2310.06825) | a sliding window |
//! | SmolLM3 | layers that do not rotate |
//! | Granite (IBM) | e, m, s and the scale of the scores |
//! | OLMo 2 (arXiv:2501.00656) | post instead of pre; norm is an RMS norm of all heads together |
//! | Gemma 3 (arXiv:2503.19786) | pre and post; norm of each head; norms multiply by 1 + w; e = √hidden; f is GELU; windows and frequencies by layer |
//! | Gemma 4 | as Gemma 3 with norms of w and of values, without a factor of scores, with wider heads in layers without a window, an input of each layer (`per_layer_input.rs`), and last layers that attend to the keys of earlier ones (`gemma4_attention.rs`) |
//! | Gemma 2 (arXiv:2408.00118) | as Gemma 3 without norm, with caps of scores and logits |
//! | Phi-3 (arXiv:2404.14219) | `qkv_proj` and `gate_up_proj`; a part of each head rotates; longrope |
//!
//! [`Family`] decides the structure and [`DecoderConfig`] the rest, as in Hugging Face's `config.json`. Norms, rotation and the
//! gated product are fused passes of `runtime`. On the CPU and in flash attention, keys and values of grouped queries are never
//! copied. So between forward and backward a block of Llama keeps, per token in elements: the outputs of both norms 2H, the rotated
//! queries and keys with the values and the attention output 2(h + g)e, 3F of the MLP, and h + 2 numbers of softmax and norms.
//! The residual stream itself is not kept.
//!
//! Parameters have Hugging Face's names without `model.`: `layers.0.self_attn.q_proj.weight`.
//! [`hugging_face::load_weights`](crate::hugging_face::load_weights) reads files with either names.
//!
//! ```
//! use models::module::{Input, LanguageModel, parameter_count};
//! use models::{Llama, DecoderConfig};
//! use tch::{Device, Kind, Tensor};
//!
//! let config = DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::llama(100, 16, 40, 2, 4) };
//! let model = Llama::new(&config, (Kind::Float, Device::Cpu))?;
//! let of_block = (16 * 16 + 2 * 16 * 8 + 16 * 16) + 3 * 16 * 40 + 2 * 16;
//! assert_eq!(parameter_count(&model).total, 100 * 16 + 2 * of_block + 16 + 100 * 16);
//!
//! let tokens = Tensor::from_slice(&[3i64, 1, 4]).view([1, 3]);
//! assert_eq!(model.logits(&Input::new(&tokens))?.size(), [1, 3, 100]);
//! # Ok::<(), models::Error>(())
//! ```

mod attention;
mod block;
mod delta_net;
mod gemma4_attention;
mod per_layer_input;
mod rotary;

use half::{bf16, f16};
use kernels::quantized::{blocks, is_quantized};
use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

use block::LlamaBlock;
pub use decoder::{DecoderConfig, Family, LayerType, LinearAttention, Mixture};
pub(crate) use decoder::{EMBEDDING, LM_HEAD};
use per_layer_input::PerLayerEmbedding;
use rotary::Rotaries;

use crate::embedding::{Embedding, noisy};
use crate::error::{self, Error, Result};
use crate::init::Init;
use crate::key_value_cache::{CacheShape, RecurrentShape};
use crate::linear::{Linear, dense_kind, placeholder};
use crate::loss_head::ProjectionHead;
use crate::module::{
    Block, Context, Input, LanguageModel, LogitTransform, LossHead, Module, Visitor, VisitorMut,
};
use crate::norm::RmsNorm;

/// The model. See the [module](self).
#[derive(Debug)]
pub struct Llama {
    embed_tokens: Embedding,
    per_layer: Option<PerLayerEmbedding>,
    layers: Vec<Box<dyn Block>>,
    norm: RmsNorm,
    lm_head: Box<dyn LossHead>,
    config: DecoderConfig,
}

impl Llama {
    /// Creates a model with the published initialisation: normal with `initializer_range`, biases 0, norms 1. With a dtype of
    /// [`kernels::nf4`] the projections of the blocks are quantized, one after the other, and all else is in bf16.
    ///
    /// # Errors
    /// An invalid configuration, with the field; too little memory.
    pub fn new(config: &DecoderConfig, options: (Kind, Device)) -> Result<Self> {
        Self::with_init(config, Init::Normal { std: config.initializer_range }, options)
    }

    /// Creates a model whose matrices have the given initialisation; biases are 0 and norms 1.
    pub(crate) fn with_init(config: &DecoderConfig, init: Init, options: (Kind, Device)) -> Result<Self> {
        Self::assemble(config, init, options, &mut |_, block| Ok(block))
    }

    /// Creates a model whose matrices have the given initialisation, passing each block with its number to `wrap` before the
    /// next block is created. `wrap` returns the block to use. So a technique such as offloading can create a model in the
    /// memory of one block.
    ///
    /// # Errors
    /// As [`Llama::new`]; those of `wrap`.
    pub fn assemble(
        config: &DecoderConfig,
        init: Init,
        options: (Kind, Device),
        wrap: &mut dyn FnMut(usize, Box<dyn Block>) -> Result<Box<dyn Block>>,
    ) -> Result<Self> {
        config.check().map_err(error::decoder)?;
        let &DecoderConfig { vocab_size, hidden_size, .. } = config;
        let rope = Rotaries::new(config, options.1)?;
        let of_block = options;
        let options = (dense_kind(options.0), options.1);
        let in_blocks = of_block.0 == blocks::KIND;
        let embed_tokens = match in_blocks {
            true => Embedding::from(placeholder(vocab_size, options.1)?),
            false => Embedding::new(vocab_size, hidden_size, init, options)?,
        };
        let per_layer = PerLayerEmbedding::new(config, init, of_block)?;
        let block = |layer| -> Result<Box<dyn Block>> {
            wrap(
                layer,
                Box::new(LlamaBlock::new(config, rope.of_layer(config, layer), layer, init, of_block)?),
            )
        };
        let layers = (0..config.num_hidden_layers as usize).map(block).collect::<Result<_>>()?;
        let head = if config.tie_word_embeddings {
            Linear { weight: embed_tokens.weight.shallow_clone(), bias: None }
        } else {
            Linear::with_init(
                hidden_size,
                vocab_size,
                None,
                init,
                if in_blocks { of_block } else { options },
            )?
        };
        let transform =
            LogitTransform { scale: 1.0 / config.logits_scaling, softcap: config.final_logit_softcapping };
        Ok(Self {
            embed_tokens,
            per_layer,
            layers,
            norm: norm(config, hidden_size, options)?,
            lm_head: Box::new(ProjectionHead::with_transform(head, transform)),
            config: config.clone(),
        })
    }

    /// Returns the configuration.
    pub fn decoder_config(&self) -> &DecoderConfig {
        &self.config
    }
}

/// Creates a norm of this width.
fn norm(config: &DecoderConfig, width: i64, options: (Kind, Device)) -> Result<RmsNorm> {
    let offset = if config.family.facts().has_offset_norms { 1.0 } else { 0.0 };
    RmsNorm::with_offset(width, config.rms_norm_eps, offset, (dense_kind(options.0), options.1))
}

/// The factor of the embedding's rows of this dtype.
fn embedding_scale(config: &DecoderConfig, kind: Kind) -> f64 {
    if !config.family.is_gemma() {
        return config.embedding_multiplier;
    }
    rounded_root(config.hidden_size, kind) * config.embedding_multiplier
}

/// The square root of a width, rounded to a dtype. No tensor is read, which a captured step cannot.
fn rounded_root(width: i64, kind: Kind) -> f64 {
    let root = (width as f64).sqrt();
    match kind {
        Kind::Float => f64::from(root as f32),
        Kind::BFloat16 => bf16::from_f32(root as f32).to_f64(),
        Kind::Half => f16::from_f32(root as f32).to_f64(),
        _ => root,
    }
}

impl Module for Llama {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("embed_tokens", &self.embed_tokens);
        if let Some(per_layer) = &self.per_layer {
            visitor.part("", per_layer);
        }
        for (index, layer) in self.layers.iter().enumerate() {
            visitor.part(&format!("layers.{index}"), &**layer);
        }
        visitor.part("norm", &self.norm);
        visitor.part("lm_head", &*self.lm_head);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.embedding("embed_tokens", &mut self.embed_tokens)?;
        self.per_layer.as_mut().map_or(Ok(()), |per_layer| visitor.part("", per_layer))?;
        for (index, layer) in self.layers.iter_mut().enumerate() {
            visitor.block(&format!("layers.{index}"), layer)?;
        }
        visitor.part("norm", &mut self.norm)?;
        visitor.loss_head("lm_head", &mut self.lm_head)
    }
}

impl LanguageModel for Llama {
    fn hidden(&self, input: &Input<'_>) -> Result<Tensor> {
        let context = Context { positions: input.positions, ..input.context };
        let mut x = self.embed_tokens.forward(input.tokens)?;
        let scale = embedding_scale(&self.config, x.kind());
        if scale != 1.0 {
            x = x.try_mul_scalar(scale)?;
        }
        x = noisy(x, &context)?;
        let of_layers =
            self.per_layer.as_ref().map(|part| part.inputs(input.tokens, &x, &context)).transpose()?;
        // Keys and values that later layers attend to, by the layer that made them.
        let mut keys: Vec<(usize, [Tensor; 2])> = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            if self.config.gemma4.is_none() {
                x = layer.forward(&x, &context)?;
                continue;
            }
            let source = self.config.key_layer(index);
            let shared = keys.iter().find(|(of, _)| *of == source);
            let mut values: Vec<&Tensor> =
                std::iter::once(&x).chain(of_layers.as_ref().map(|all| &all[index])).collect();
            values.extend(shared.iter().flat_map(|(_, keys)| keys));
            let results = layer.forward_with(&values, &context)?;
            let mut results = results.into_iter();
            let (next, k, v) = (results.next(), results.next(), results.next());
            x = next.ok_or_else(|| Error::invalid("model", format!("layer {index} has no result")))?;
            if let (Some(k), Some(v)) = (k, v) {
                keys.push((index, [k, v]));
            }
        }
        self.norm.forward(&x)
    }

    fn head(&self) -> &dyn LossHead {
        &*self.lm_head
    }

    fn config(&self) -> serde_json::Value {
        // Fields that no computation depends on must not prevent a training from being resumed.
        let config = DecoderConfig { other_fields: serde_json::Map::new(), ..self.config.clone() };
        serde_json::to_value(config).unwrap_or_default()
    }

    fn vocabulary(&self) -> i64 {
        self.config.vocab_size
    }

    fn cache_shape(&self) -> Option<CacheShape> {
        let weight = &self.embed_tokens.weight;
        let linear = self.config.linear_layers();
        let recurrent = self.config.linear_attention.map(|sizes| RecurrentShape {
            layers: linear,
            heads: sizes.value_heads,
            key: sizes.key_dim,
            value: sizes.value_dim,
            channels: sizes.channels(),
            window: sizes.window - 1,
        });
        Some(CacheShape {
            layers: (0..self.layers.len())
                .filter(|&layer| !self.config.is_linear(layer) && self.config.key_layer(layer) == layer)
                .map(|layer| [self.config.layer_kv_heads(layer), self.config.layer_head_dim(layer)])
                .collect(),
            recurrent,
            kind: if is_quantized(weight) { Kind::BFloat16 } else { weight.kind() },
            device: weight.device(),
        })
    }

    fn has_separate_blocks(&self) -> bool {
        self.config.gemma4.is_none()
    }

    fn cache_limit(&self) -> Option<i64> {
        self.config.long_rope.as_ref().map(|rope| rope.original_positions)
    }

    fn max_sequence(&self) -> i64 {
        self.config.max_position_embeddings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_is_rounded_as_libtorch_rounds_it() {
        for width in (1..400).chain([1536, 2048, 2560, 3840, 5376, 8191]) {
            for kind in [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double] {
                let expected = Tensor::from((width as f64).sqrt()).to_kind(kind).double_value(&[]);
                assert_eq!(rounded_root(width, kind), expected, "{width} {kind:?}");
            }
        }
    }
}
