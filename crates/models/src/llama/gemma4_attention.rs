//! The attention of a Gemma 4's block.
//!
//! ```text
//! q = rotate(norm(q_proj(x)));   k = rotate(norm(k_proj(x)));   v = rms(v_proj(x)), or rms(k_proj(x)) without a v_proj
//! y = o_proj(attention(q, k, v))                                  scores without a factor
//! ```
//!
//! The last layers have no k and v of their own: they attend to those of the last layer of their type before them. These are values that
//! go from block to block ([`Block::forward_with`](crate::module::Block::forward_with)), so that their gradients reach the layer that made
//! them, whatever a technique does with the blocks in between. A cache holds them once, in that layer's place.

use decoder::BiasOption;
use runtime::tensor_layout::TensorLayout;
use tch::{Device, Kind, Tensor};

use super::rotary::Rotary;
use super::{DecoderConfig, norm};
use crate::attention::{AttentionConfig, AttentionPath, attention};
use crate::error::{Error, Result, wrong_shape};
use crate::init::Init;
use crate::linear::{Linear, project_all};
use crate::module::{Attention, Context, Module, Projection, Visitor, VisitorMut, one};
use crate::norm::{RmsNorm, rms_norm_without_weight};

#[derive(Debug)]
pub(super) struct Gemma4Attention {
    q_proj: Box<dyn Projection>,
    q_norm: RmsNorm,
    /// `None` in a layer that attends to the keys of another.
    own_keys: Option<OwnKeys>,
    o_proj: Box<dyn Projection>,
    rope: Option<Rotary>,
    /// The index of the layer with the keys among those of the cache.
    cache_index: usize,
    head: i64,
    eps: f64,
    path: AttentionPath,
    /// In training.
    dropout: f64,
    scale: Option<f64>,
    window: Option<i64>,
}

/// The projections of keys and values.
#[derive(Debug)]
struct OwnKeys {
    k_proj: Box<dyn Projection>,
    /// `None` where values are keys.
    v_proj: Option<Box<dyn Projection>>,
    k_norm: RmsNorm,
    /// Whether a later layer attends to them, so that they are results.
    are_shared: bool,
}

impl Gemma4Attention {
    pub(super) fn new(
        config: &DecoderConfig,
        rope: Option<Rotary>,
        layer: usize,
        init: Init,
        options: (Kind, Device),
    ) -> Result<Self> {
        let linear = |from, to, option: BiasOption| -> Result<Box<dyn Projection>> {
            let bias = config.has_bias(option).then_some(Init::Constant(0.0));
            Ok(Box::new(Linear::with_init(from, to, bias, init, options)?))
        };
        let (hidden, head) = (config.hidden_size, config.layer_head_dim(layer));
        let of_queries = config.num_attention_heads * head;
        let of_keys = config.layer_kv_heads(layer) * head;
        let input = || linear(hidden, of_keys, BiasOption::QueriesKeysValues);
        let key_layer = config.key_layer(layer);
        let q_proj = linear(hidden, of_queries, BiasOption::QueriesKeysValues)?;
        let own_keys = if key_layer == layer {
            let k_proj = input()?;
            let v_proj = config.has_value_projection(layer).then(input).transpose()?;
            let k_norm = norm(config, head, options)?;
            Some(OwnKeys { k_proj, v_proj, k_norm, are_shared: config.gives_keys(layer) })
        } else {
            None
        };
        Ok(Self {
            q_proj,
            q_norm: norm(config, head, options)?,
            own_keys,
            o_proj: linear(of_queries, hidden, BiasOption::AttentionOutput)?,
            rope,
            // Only layers without keys are not in the cache, and they are the last.
            cache_index: key_layer,
            head,
            eps: config.rms_norm_eps,
            path: config.attention,
            dropout: config.attention_dropout,
            scale: config.attention_scale(),
            window: config.window(layer),
        })
    }

    /// Divides a projection's result `[b, t, heads·head]` into heads.
    fn heads(&self, joint: &Tensor) -> Result<Tensor> {
        let layout = TensorLayout::of(joint)?;
        let &[batch, sequence, width] = layout.size() else {
            let expected = "[batch, sequence, heads·head]".to_owned();
            return Err(wrong_shape("attention", "a projection's result", layout.size(), expected));
        };
        Ok(joint.f_view([batch, sequence, width / self.head, self.head])?)
    }

    /// Returns the queries, and the layer's own keys and values: `[b, t, heads, head]`, normalized and rotated.
    fn project(&self, x_btd: &Tensor, own: &OwnKeys, context: &Context<'_>) -> Result<[Tensor; 3]> {
        let (q, k, v) = match &own.v_proj {
            Some(v_proj) => {
                let [q, k, v] = project_all([&*self.q_proj, &*own.k_proj, &**v_proj], x_btd, context)?;
                (self.heads(&q)?, self.heads(&k)?, self.heads(&v)?)
            }
            None => {
                let [q, k] = project_all([&*self.q_proj, &*own.k_proj], x_btd, context)?;
                let k = self.heads(&k)?;
                (self.heads(&q)?, k.shallow_clone(), k)
            }
        };
        let normalized = (self.q_norm.forward(&q)?, own.k_norm.forward(&k)?);
        drop((q, k));
        let v = rms_norm_without_weight(&v, self.eps)?;
        let (q, k) = match &self.rope {
            Some(rope) => rope.rotate(normalized, context)?,
            None => normalized,
        };
        Ok([q, k, v])
    }
}

impl Attention for Gemma4Attention {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        one(self.forward_with(&[x_btd], context)?)
    }

    /// Values are x, and in a layer without keys those keys and values; results are the update, and keys and values that others share.
    fn forward_with(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>> {
        let options = AttentionConfig {
            path: self.path,
            dropout: if context.training { self.dropout } else { 0.0 },
            scale: self.scale,
            window: self.window,
            softcap: None,
            sinks: None,
        };
        let (q, k, v, are_shared) = match (&self.own_keys, values) {
            (Some(own), &[x_btd]) => {
                let [q, k, v] = self.project(x_btd, own, context)?;
                (q, k, v, own.are_shared)
            }
            (None, &[x_btd, k, v]) => {
                let q = self.q_norm.forward(&self.heads(&self.q_proj.forward(x_btd, context)?)?)?;
                let q = match &self.rope {
                    Some(rope) => rope.rotate_queries(&q, context)?,
                    None => q,
                };
                (q, k.shallow_clone(), v.shallow_clone(), false)
            }
            (own, values) => {
                let expected = if own.is_some() { "x alone" } else { "x, keys and values" };
                return Err(Error::invalid(
                    "attention",
                    format!("{} values; expected {expected}", values.len()),
                ));
            }
        };
        let shared = if are_shared { vec![k.shallow_clone(), v.shallow_clone()] } else { Vec::new() };
        let attended = match (context.extension, context.sequence) {
            (Some(extension), _) if self.own_keys.is_some() => {
                extension.attend(self.cache_index, &q, &k, &v, &options)?
            }
            (Some(extension), _) => extension.attend_again(self.cache_index, &q, &options)?,
            (None, Some(shard)) => shard.attention([q, k, v], context.documents, &options)?,
            (None, None) => attention(&q, &k, &v, context.documents, &options)?,
        };
        let update = self.o_proj.forward(&attended, context)?;
        Ok(std::iter::once(update).chain(shared).collect())
    }
}

impl Module for Gemma4Attention {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("q_proj", &*self.q_proj);
        if let Some(own) = &self.own_keys {
            visitor.part("k_proj", &*own.k_proj);
            if let Some(v_proj) = &own.v_proj {
                visitor.part("v_proj", &**v_proj);
            }
        }
        visitor.part("o_proj", &*self.o_proj);
        visitor.part("q_norm", &self.q_norm);
        if let Some(own) = &self.own_keys {
            visitor.part("k_norm", &own.k_norm);
        }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.projection("q_proj", &mut self.q_proj)?;
        if let Some(own) = &mut self.own_keys {
            visitor.projection("k_proj", &mut own.k_proj)?;
            if let Some(v_proj) = &mut own.v_proj {
                visitor.projection("v_proj", v_proj)?;
            }
        }
        visitor.projection("o_proj", &mut self.o_proj)?;
        visitor.part("q_norm", &mut self.q_norm)?;
        self.own_keys.as_mut().map_or(Ok(()), |own| visitor.part("k_norm", &mut own.k_norm))
    }
}
