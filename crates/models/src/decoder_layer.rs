//! PyTorch's `nn.TransformerDecoderLayer`, post-norm, with its own input as memory.
//!
//! With x the input, SA and CA attention (both causal), FF the feed-forward part:
//!
//! ```text
//! a = norm1(x + SA(x, x))
//! b = norm2(a + CA(a, x))      queries from a, keys and values from x
//! y = norm3(b + FF(b))
//! ```
//!
//! The assignment's model has one such layer. Because the memory is the layer's own input, cross attention must be causal too;
//! otherwise each position would read the future through it.

use tch::{Device, Kind, Tensor};

use crate::attention::{AttentionConfig, AttentionPath};
use crate::dropout::{check_rate, dropout};
use crate::error::{Error, Result};
use crate::feed_forward::FeedForward;
use crate::init::Init;
use crate::linear::{Linear, positive, project};
use crate::module::{Block, Context, Mlp, Module, Projection, Visitor, VisitorMut};
use crate::norm::{LayerNorm, NormKernel};
use crate::sequence_parallel::attention_within;

/// The layer, with PyTorch's names for its parameters.
#[derive(Debug)]
pub struct TransformerDecoderLayer {
    self_attn: MultiheadAttention,
    multihead_attn: MultiheadAttention,
    mlp: Box<dyn Mlp>,
    norms: [LayerNorm; 3],
    dropout: f64,
}

impl TransformerDecoderLayer {
    /// Creates the layer with PyTorch's initialisation and epsilon.
    ///
    /// # Errors
    /// A size below 1, a width that the heads do not divide, a dropout outside [0, 1).
    pub fn new(
        hidden: i64,
        heads: i64,
        inner: i64,
        dropout: f64,
        path: AttentionPath,
        options: (Kind, Device),
    ) -> Result<Self> {
        check_rate("decoder layer", dropout)?;
        let norm = || LayerNorm::new(hidden, 1e-5, options);
        Ok(Self {
            self_attn: MultiheadAttention::new(hidden, heads, dropout, path, options)?,
            multihead_attn: MultiheadAttention::new(hidden, heads, dropout, path, options)?,
            mlp: Box::new(FeedForward::torch(hidden, inner, dropout, options)?),
            norms: [norm()?, norm()?, norm()?],
            dropout,
        })
    }

    /// Computes the norms by `kernel`.
    #[must_use]
    pub fn with_norms(mut self, kernel: NormKernel) -> Self {
        self.norms.iter_mut().for_each(|norm| norm.kernel = kernel);
        self
    }
}

impl Module for TransformerDecoderLayer {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("self_attn", &self.self_attn);
        visitor.part("multihead_attn", &self.multihead_attn);
        visitor.part("", &*self.mlp);
        for (name, norm) in ["norm1", "norm2", "norm3"].into_iter().zip(&self.norms) {
            visitor.part(name, norm);
        }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.part("self_attn", &mut self.self_attn)?;
        visitor.part("multihead_attn", &mut self.multihead_attn)?;
        visitor.mlp("", &mut self.mlp)?;
        let names = ["norm1", "norm2", "norm3"].into_iter();
        names.zip(&mut self.norms).try_for_each(|(name, norm)| visitor.part(name, norm))
    }
}

impl Block for TransformerDecoderLayer {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let add = |x: &Tensor, update: Tensor| -> Result<Tensor> {
            Ok(x.f_add(&dropout(update, self.dropout, context.training)?)?)
        };
        let [norm1, norm2, norm3] = &self.norms;
        let a = norm1.forward(&add(x_btd, self.self_attn.self_attention(x_btd, context)?)?)?;
        let b = norm2.forward(&add(&a, self.multihead_attn.cross_attention(&a, x_btd, context)?)?)?;
        norm3.forward(&add(&b, self.mlp.forward(&b, context)?)?)
    }
}

/// PyTorch's `nn.MultiheadAttention`: one weight holds the projections of queries, keys and values.
#[derive(Debug)]
struct MultiheadAttention {
    in_proj_weight: Tensor,
    in_proj_bias: Tensor,
    out_proj: Box<dyn Projection>,
    heads: i64,
    dropout: f64,
    path: AttentionPath,
}

impl MultiheadAttention {
    fn new(
        hidden: i64,
        heads: i64,
        dropout: f64,
        path: AttentionPath,
        options: (Kind, Device),
    ) -> Result<Self> {
        let what = "attention";
        positive(what, &[("hidden", hidden), ("heads", heads)])?;
        if hidden % heads != 0 {
            let reason =
                format!("{heads} heads do not divide the width {hidden}; take a multiple of {heads}");
            return Err(Error::invalid(what, reason));
        }
        // PyTorch initialises the joint weight by Xavier over its whole shape, and both biases to zero.
        let (zeros, joint) = (Init::Constant(0.0), Init::xavier_uniform(hidden, 3 * hidden));
        let out = Linear::with_init(hidden, hidden, Some(zeros), Init::torch_linear(hidden), options)?;
        Ok(Self {
            in_proj_weight: joint.parameter(&[3 * hidden, hidden], options)?,
            in_proj_bias: zeros.parameter(&[3 * hidden], options)?,
            out_proj: Box::new(out),
            heads,
            dropout,
            path,
        })
    }

    fn self_attention(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let joint = project(x, &self.in_proj_weight, Some(&self.in_proj_bias))?;
        self.attend(self.heads_of(&joint)?, context)
    }

    fn cross_attention(&self, x: &Tensor, memory: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let hidden = self.in_proj_weight.size()[1];
        let (weights, biases) = ([hidden, 2 * hidden], [hidden, 2 * hidden]);
        let weights = self.in_proj_weight.f_split_with_sizes(weights, 0)?;
        let biases = self.in_proj_bias.f_split_with_sizes(biases, 0)?;
        let [q] = self.heads_of(&project(x, &weights[0], Some(&biases[0]))?)?;
        let [k, v] = self.heads_of(&project(memory, &weights[1], Some(&biases[1]))?)?;
        self.attend([q, k, v], context)
    }

    fn attend(&self, qkv: [Tensor; 3], context: &Context<'_>) -> Result<Tensor> {
        let dropout = if context.training { self.dropout } else { 0.0 };
        let options = AttentionConfig { path: self.path, dropout, ..AttentionConfig::default() };
        self.out_proj.forward(&attention_within(context, qkv, &options)?, context)
    }

    /// Splits `[b, t, n·hidden]` into n views `[b, t, heads, head]`.
    fn heads_of<const N: usize>(&self, joint: &Tensor) -> Result<[Tensor; N]> {
        split_heads(joint, self.heads)
    }
}

/// Splits `[b, t, n·heads·head]` into n views `[b, t, heads, head]`.
pub(crate) fn split_heads<const N: usize>(joint: &Tensor, heads: i64) -> Result<[Tensor; N]> {
    let (batch, sequence, width) = joint.size3()?;
    let parts = joint.f_view([batch, sequence, N as i64, heads, width / (N as i64 * heads)])?.f_unbind(2)?;
    let count = parts.len();
    parts.try_into().map_err(|_| Error::invalid("attention", format!("{count} parts for {N}")))
}

impl Module for MultiheadAttention {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter("in_proj_weight", &self.in_proj_weight);
        visitor.parameter("in_proj_bias", &self.in_proj_bias);
        visitor.part("out_proj", &*self.out_proj);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.parameter("in_proj_weight", &mut self.in_proj_weight)?;
        visitor.parameter("in_proj_bias", &mut self.in_proj_bias)?;
        visitor.projection("out_proj", &mut self.out_proj)
    }
}
