//! A block: attention with rotary embeddings, then the MLP, each on a normalised copy of the residual stream.

use runtime::fused::rope::RotaryTable;
use tch::{Device, Kind, Tensor};

use super::LlamaConfig;
use crate::attention::{AttentionPath, causal_attention};
use crate::error::Result;
use crate::init::Init;
use crate::linear::Linear;
use crate::module::{Attention, Block, Context, Mlp, Module, Projection, Visitor, VisitorMut};
use crate::norm::RmsNorm;
use crate::swiglu::Swiglu;

#[derive(Debug)]
pub(super) struct LlamaBlock {
    self_attn: Box<dyn Attention>,
    mlp: Box<dyn Mlp>,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
}

impl LlamaBlock {
    pub(super) fn new(
        config: &LlamaConfig,
        rope: RotaryTable,
        layer: usize,
        init: Init,
        options: (Kind, Device),
    ) -> Result<Self> {
        let &LlamaConfig { hidden_size, intermediate_size, mlp_bias, rms_norm_eps, .. } = config;
        Ok(Self {
            self_attn: Box::new(SelfAttention::new(config, rope, layer, init, options)?),
            mlp: Box::new(Swiglu::new(hidden_size, intermediate_size, mlp_bias, init, options)?),
            input_layernorm: RmsNorm::new(hidden_size, rms_norm_eps, options)?,
            post_attention_layernorm: RmsNorm::new(hidden_size, rms_norm_eps, options)?,
        })
    }
}

impl Module for LlamaBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("self_attn", &*self.self_attn);
        visitor.part("mlp", &*self.mlp);
        visitor.part("input_layernorm", &self.input_layernorm);
        visitor.part("post_attention_layernorm", &self.post_attention_layernorm);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.attention("self_attn", &mut self.self_attn)?;
        visitor.mlp("mlp", &mut self.mlp)?;
        visitor.part("input_layernorm", &mut self.input_layernorm)?;
        visitor.part("post_attention_layernorm", &mut self.post_attention_layernorm)
    }
}

impl Block for LlamaBlock {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let x = x_btd.f_add(&self.self_attn.forward(&self.input_layernorm.forward(x_btd)?, context)?)?;
        Ok(x.f_add(&self.mlp.forward(&self.post_attention_layernorm.forward(&x)?, context)?)?)
    }
}

#[derive(Debug)]
struct SelfAttention {
    q_proj: Box<dyn Projection>,
    k_proj: Box<dyn Projection>,
    v_proj: Box<dyn Projection>,
    o_proj: Box<dyn Projection>,
    rope: RotaryTable,
    /// The layer's index in the cache.
    layer: usize,
    head: i64,
    dropout: f64,
    path: AttentionPath,
}

impl SelfAttention {
    fn new(
        config: &LlamaConfig,
        rope: RotaryTable,
        layer: usize,
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
        Ok(Self {
            q_proj: linear(hidden, of_queries, config.qkv_bias())?,
            k_proj: linear(hidden, of_keys, config.qkv_bias())?,
            v_proj: linear(hidden, of_keys, config.qkv_bias())?,
            o_proj: linear(of_queries, hidden, config.output_bias())?,
            rope,
            layer,
            head,
            dropout: config.attention_dropout,
            path: config.attention,
        })
    }
}

impl Attention for SelfAttention {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        // [b, t, heads·head] to [b, t, heads, head]; the projection's width decides the number of heads.
        let heads = |projection: &dyn Projection| -> Result<Tensor> {
            let joint = projection.forward(x_btd, context)?;
            let (batch, sequence, width) = joint.size3()?;
            Ok(joint.f_view([batch, sequence, width / self.head, self.head])?)
        };
        let (q, k) = self.rope.rotate(&heads(&*self.q_proj)?, &heads(&*self.k_proj)?, context.positions)?;
        let v = heads(&*self.v_proj)?;
        let dropout = if context.training { self.dropout } else { 0.0 };
        let attended = match context.extension {
            Some(extension) => extension.attend(self.layer, &q, &k, &v)?,
            None => causal_attention(&q, &k, &v, context.documents, self.path, dropout)?,
        };
        self.o_proj.forward(&attended, context)
    }
}

impl Module for SelfAttention {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("q_proj", &*self.q_proj);
        visitor.part("k_proj", &*self.k_proj);
        visitor.part("v_proj", &*self.v_proj);
        visitor.part("o_proj", &*self.o_proj);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.projection("q_proj", &mut self.q_proj)?;
        visitor.projection("k_proj", &mut self.k_proj)?;
        visitor.projection("v_proj", &mut self.v_proj)?;
        visitor.projection("o_proj", &mut self.o_proj)
    }
}
