//! A block's attention: projections, norms of queries and keys, rotation, attention within the window.

use decoder::{BiasOption, QueryKeyNorm};
use runtime::tensor_layout::TensorLayout;
use tch::{Device, Kind, Tensor};

use super::rotary::Rotary;
use super::{DecoderConfig, norm};
use crate::attention::{AttentionConfig, AttentionPath, Documents, attention, attention_of_rows, has_kernel};
use crate::error::{Error, Result, wrong_shape};
use crate::init::Init;
use crate::linear::{Linear, dense_kind, project_all};
use crate::module::{Attention, Context, Module, Projection, Visitor, VisitorMut};
use crate::norm::RmsNorm;

#[derive(Debug)]
pub(super) struct SelfAttention {
    projections: Projections,
    o_proj: Box<dyn Projection>,
    /// The sink of each query head, in a family with sinks.
    sinks: Option<Tensor>,
    /// Norms of queries and keys, and whether they cover all heads of a token.
    norms: Option<([RmsNorm; 2], bool)>,
    rope: Option<Rotary>,
    /// The layer's index among those of the cache with keys and values.
    layer: usize,
    /// Whether each head of queries has a gate after it.
    is_gated: bool,
    head: i64,
    options: Options,
}

/// The options of the attention but for its sinks.
#[derive(Debug, Clone, Copy)]
struct Options {
    path: AttentionPath,
    /// In training.
    dropout: f64,
    scale: Option<f64>,
    window: Option<i64>,
    softcap: Option<f64>,
}

/// The projections to queries, keys and values.
#[derive(Debug)]
enum Projections {
    Separate {
        q: Box<dyn Projection>,
        k: Box<dyn Projection>,
        v: Box<dyn Projection>,
    },
    /// One, with the widths of queries and of keys.
    Joint {
        qkv: Box<dyn Projection>,
        widths: [i64; 2],
    },
}

impl SelfAttention {
    pub(super) fn new(
        config: &DecoderConfig,
        rope: Option<Rotary>,
        (layer, cache_index): (usize, usize),
        init: Init,
        options: (Kind, Device),
    ) -> Result<Self> {
        let linear = |from, to, bias: bool| -> Result<Box<dyn Projection>> {
            let bias = bias.then_some(Init::Constant(0.0));
            Ok(Box::new(Linear::with_init(from, to, bias, init, options)?))
        };
        let (hidden, head) = (config.hidden_size, config.head_dim);
        let of_queries = config.num_attention_heads * head;
        let of_keys = config.num_key_value_heads * head;
        let is_gated = config.family.facts().has_attention_gate;
        let projections = if config.family.facts().has_joint_projections {
            let qkv = linear(hidden, of_queries + 2 * of_keys, false)?;
            Projections::Joint { qkv, widths: [of_queries, of_keys] }
        } else {
            Projections::Separate {
                q: linear(
                    hidden,
                    if is_gated { 2 * of_queries } else { of_queries },
                    config.has_bias(BiasOption::QueriesKeysValues),
                )?,
                k: linear(hidden, of_keys, config.has_bias(BiasOption::QueriesKeysValues))?,
                v: linear(hidden, of_keys, config.has_bias(BiasOption::QueriesKeysValues))?,
            }
        };
        let o_proj = linear(of_queries, hidden, config.has_bias(BiasOption::AttentionOutput))?;
        let sinks = config.family.facts().has_sinks;
        let sinks = sinks
            .then(|| init.parameter(&[config.num_attention_heads], (dense_kind(options.0), options.1)))
            .transpose()?;
        let norms = |widths: [i64; 2], covers_all: bool| -> Result<_> {
            Ok(Some(([norm(config, widths[0], options)?, norm(config, widths[1], options)?], covers_all)))
        };
        let norms = match config.family.facts().query_key_norm {
            QueryKeyNorm::None => None,
            QueryKeyNorm::PerHead => norms([head; 2], false)?,
            QueryKeyNorm::AllHeads => norms([of_queries, of_keys], true)?,
        };
        let options = Options {
            path: config.attention,
            dropout: config.attention_dropout,
            scale: config.attention_scale(),
            window: config.window(layer),
            softcap: config.attn_logit_softcapping,
        };
        Ok(Self { projections, o_proj, sinks, norms, rope, layer: cache_index, is_gated, head, options })
    }

    /// Queries, keys and values, `[b, t, width]`.
    fn project(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<[Tensor; 3]> {
        match &self.projections {
            Projections::Separate { q, k, v } => project_all([&**q, &**k, &**v], x_btd, context),
            Projections::Joint { qkv, widths: [of_queries, of_keys] } => {
                let joint = qkv.forward(x_btd, context)?;
                let parts = joint.f_split_with_sizes([*of_queries, *of_keys, *of_keys], -1)?;
                parts.try_into().map_err(|_| {
                    let reason = "expected queries, keys and values".to_owned();
                    Error::invalid("attention", reason)
                })
            }
        }
    }

    /// Returns whether queries, keys and values stay as the projections return them, so that the graph has no view of each: by the kernel
    /// that reads heads in any layout.
    fn takes_rows(&self, q: &TensorLayout, context: &Context<'_>) -> bool {
        let by_head = matches!(&self.norms, Some((_, false)));
        let whole_heads = self.rope.as_ref().is_none_or(Rotary::turns_whole_heads);
        let options = self.options_for(context);
        let fused = options.path == AttentionPath::Fused && has_kernel(q, &options);
        let whole_rows = context.documents.is_none_or(Documents::are_on_host) && context.sequence.is_none();
        context.extension.is_none() && whole_rows && !by_head && whole_heads && fused
    }

    /// Divides queries with gates, each head's `[query, gate]`, into both, `[b, t, heads·head]`. They are copies: the joint tensor is freed.
    fn divide_gates(&self, q: Tensor) -> Result<(Tensor, Tensor)> {
        let (batch, sequence, width) = q.size3()?;
        let pairs = q.f_view([batch, sequence, width / (2 * self.head), 2, self.head])?.f_unbind(3)?;
        let flat = |x: &Tensor| x.f_reshape([batch, sequence, width / 2]);
        Ok((flat(&pairs[0])?, flat(&pairs[1])?))
    }

    fn options_for(&self, context: &Context<'_>) -> AttentionConfig<'_> {
        let Options { path, dropout, scale, window, softcap } = self.options;
        let dropout = if context.training { dropout } else { 0.0 };
        AttentionConfig { path, dropout, scale, window, softcap, sinks: self.sinks.as_ref() }
    }
}

impl Attention for SelfAttention {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let [q, k, v] = self.project(x_btd, context)?;
        let (q, gate) = if self.is_gated {
            let (q, gate) = self.divide_gates(q)?;
            (q, Some(gate))
        } else {
            (q, None)
        };
        let output = |attended: Tensor| match &gate {
            Some(gate) => self.o_proj.forward(&attended.f_mul(&gate.f_sigmoid()?)?, context),
            None => self.o_proj.forward(&attended, context),
        };
        let options = self.options_for(context);
        if self.takes_rows(&TensorLayout::of(&q)?, context) {
            let (q, k) = match &self.norms {
                None => (q, k),
                Some((norms, _)) => (norms[0].forward(&q)?, norms[1].forward(&k)?),
            };
            let (q, k) = match &self.rope {
                Some(rope) => rope.rotate((q, k), context)?,
                None => (q, k),
            };
            let attended = attention_of_rows(&q, &k, &v, (self.head, context.documents), &options)?;
            return output(attended);
        }
        // [b, t, heads·head] to [b, t, heads, head]; the projection's width decides the number of heads.
        let heads = |joint: &Tensor| -> Result<Tensor> {
            let layout = TensorLayout::of(joint)?;
            let &[batch, sequence, width] = layout.size() else {
                let expected = "[batch, sequence, heads·head]".to_owned();
                return Err(wrong_shape("attention", "a projection's result", layout.size(), expected));
            };
            Ok(joint.f_view([batch, sequence, width / self.head, self.head])?)
        };
        let normalised = match &self.norms {
            None => (heads(&q)?, heads(&k)?),
            Some((norms, true)) => (heads(&norms[0].forward(&q)?)?, heads(&norms[1].forward(&k)?)?),
            Some((norms, false)) => (norms[0].forward(&heads(&q)?)?, norms[1].forward(&heads(&k)?)?),
        };
        // Each step's results replace those of the step before, which nothing else holds without a graph.
        drop((q, k));
        let (q, k) = match &self.rope {
            Some(rope) => rope.rotate(normalised, context)?,
            None => normalised,
        };
        let v = heads(&v)?;
        let attended = match (context.extension, context.sequence) {
            (Some(extension), _) => extension.attend(self.layer, &q, &k, &v, &options)?,
            (None, Some(shard)) => shard.attention([q, k, v], context.documents, &options)?,
            (None, None) => attention(&q, &k, &v, context.documents, &options)?,
        };
        output(attended)
    }
}

impl Module for SelfAttention {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        match &self.projections {
            Projections::Separate { q, k, v } => {
                visitor.part("q_proj", &**q);
                visitor.part("k_proj", &**k);
                visitor.part("v_proj", &**v);
            }
            Projections::Joint { qkv, .. } => visitor.part("qkv_proj", &**qkv),
        }
        visitor.part("o_proj", &*self.o_proj);
        visitor.optional_parameter("sinks", self.sinks.as_ref());
        if let Some(([q_norm, k_norm], _)) = &self.norms {
            visitor.part("q_norm", q_norm);
            visitor.part("k_norm", k_norm);
        }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        match &mut self.projections {
            Projections::Separate { q, k, v } => {
                visitor.projection("q_proj", q)?;
                visitor.projection("k_proj", k)?;
                visitor.projection("v_proj", v)?;
            }
            Projections::Joint { qkv, .. } => visitor.projection("qkv_proj", qkv)?,
        }
        visitor.projection("o_proj", &mut self.o_proj)?;
        visitor.optional_parameter("sinks", self.sinks.as_mut())?;
        if let Some(([q_norm, k_norm], _)) = &mut self.norms {
            visitor.part("q_norm", q_norm)?;
            visitor.part("k_norm", k_norm)?;
        }
        Ok(())
    }
}
