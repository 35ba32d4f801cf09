//! GPT-2 (Radford et al. 2019): a pre-norm decoder of any depth.
//!
//! ```text
//! x = wte[tokens] + wpe[positions]
//! x = x + c_proj(attention(c_attn(ln_1(x))))     in each of `layers` blocks,
//! x = x + c_proj(gelu(c_fc(ln_2(x))))
//! logits = ln_f(x)·wteᵀ                          the head shares the embedding's weights
//! ```
//!
//! Parameters have the names of the published checkpoints without `transformer.`; weights are `[out, in]`, where those
//! checkpoints store the transposes.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::activation::Activation;
use crate::attention::{AttentionConfig, AttentionPath};
use crate::decoder_layer::split_heads;
use crate::dropout::{check_rate, dropout};
use crate::embedding::{Embedding, noisy};
use crate::error::{Error, Result};
use crate::feed_forward::FeedForward;
use crate::init::Init;
use crate::linear::{Linear, positive};
use crate::loss_head::ProjectionHead;
use crate::module::{
    Attention, Block, Context, Input, LanguageModel, LossHead, Mlp, Module, Projection, Visitor, VisitorMut,
};
use crate::norm::LayerNorm;
use crate::position::LearnedPositionalEmbedding;
use crate::sequence_parallel::attention_within;

/// Sizes of a [`Gpt2`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gpt2Config {
    /// Vocabulary size.
    pub vocabulary: i64,
    /// Maximum sequence length.
    pub max_sequence: i64,
    /// Width.
    pub hidden: i64,
    /// Number of heads; they divide `hidden`.
    pub heads: i64,
    /// Number of blocks.
    pub layers: i64,
    /// Dropout probability of activations and attention weights in training.
    pub dropout: f64,
    /// How attention is computed.
    #[serde(skip)]
    pub attention: AttentionPath,
}

impl Gpt2Config {
    /// Returns the configuration of the published model with 124 million parameters, without dropout.
    pub fn small() -> Self {
        Self {
            vocabulary: 50257,
            max_sequence: 1024,
            hidden: 768,
            heads: 12,
            layers: 12,
            dropout: 0.0,
            attention: AttentionPath::Fused,
        }
    }
}

/// The model. See the [module](self).
#[derive(Debug)]
pub struct Gpt2 {
    wte: Embedding,
    wpe: LearnedPositionalEmbedding,
    blocks: Vec<Box<dyn Block>>,
    ln_f: LayerNorm,
    head: Box<dyn LossHead>,
    config: Gpt2Config,
}

impl Gpt2 {
    /// Creates a model with the published initialisation: normal with σ = 0.02, and 0.02/√(2·layers) for projections into the
    /// residual stream.
    ///
    /// # Errors
    /// A size below 1, a width that the heads do not divide, a dropout outside [0, 1).
    pub fn new(config: &Gpt2Config, options: (Kind, Device)) -> Result<Self> {
        let &Gpt2Config { vocabulary, max_sequence, hidden, heads, layers, dropout, .. } = config;
        let what = "GPT-2";
        let sizes = [
            ("vocabulary", vocabulary),
            ("max_sequence", max_sequence),
            ("hidden", hidden),
            ("heads", heads),
            ("layers", layers),
        ];
        positive(what, &sizes)?;
        check_rate(what, dropout)?;
        if hidden % heads != 0 {
            let reason =
                format!("{heads} heads do not divide the width {hidden}; take a multiple of {heads}");
            return Err(Error::invalid(what, reason));
        }
        let init = Init::Normal { std: 0.02 };
        let wte = Embedding::new(vocabulary, hidden, init, options)?;
        let tied = Linear { weight: wte.weight.shallow_clone(), bias: None };
        let block = |_| -> Result<Box<dyn Block>> { Ok(Box::new(Gpt2Block::new(config, options)?)) };
        Ok(Self {
            wpe: LearnedPositionalEmbedding::new(max_sequence, hidden, init, options)?,
            blocks: (0..layers).map(block).collect::<Result<_>>()?,
            ln_f: LayerNorm::new(hidden, 1e-5, options)?,
            head: Box::new(ProjectionHead::new(tied)),
            config: config.clone(),
            wte,
        })
    }
}

impl Module for Gpt2 {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("wte", &self.wte);
        visitor.part("wpe", &self.wpe);
        for (index, block) in self.blocks.iter().enumerate() {
            visitor.part(&format!("h.{index}"), &**block);
        }
        visitor.part("ln_f", &self.ln_f);
        visitor.part("lm_head", &*self.head);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.embedding("wte", &mut self.wte)?;
        visitor.part("wpe", &mut self.wpe)?;
        for (index, block) in self.blocks.iter_mut().enumerate() {
            visitor.block(&format!("h.{index}"), block)?;
        }
        visitor.part("ln_f", &mut self.ln_f)?;
        visitor.loss_head("lm_head", &mut self.head)
    }
}

impl LanguageModel for Gpt2 {
    fn hidden(&self, input: &Input<'_>) -> Result<Tensor> {
        let embedded = noisy(self.wte.forward(input.tokens)?, &input.context)?;
        let embedded = self.wpe.forward(&embedded, input.positions)?;
        let mut x = dropout(embedded, self.config.dropout, input.context.training)?;
        for block in &self.blocks {
            x = block.forward(&x, &input.context)?;
        }
        self.ln_f.forward(&x)
    }

    fn head(&self) -> &dyn LossHead {
        &*self.head
    }

    fn config(&self) -> serde_json::Value {
        serde_json::to_value(&self.config).unwrap_or_default()
    }

    fn vocabulary(&self) -> i64 {
        self.config.vocabulary
    }

    fn max_sequence(&self) -> i64 {
        self.config.max_sequence
    }
}

#[derive(Debug)]
struct Gpt2Block {
    ln_1: LayerNorm,
    attn: Box<dyn Attention>,
    ln_2: LayerNorm,
    mlp: Box<dyn Mlp>,
    dropout: f64,
}

impl Gpt2Block {
    fn new(config: &Gpt2Config, options: (Kind, Device)) -> Result<Self> {
        let &Gpt2Config { hidden, heads, layers, dropout, attention, .. } = config;
        let std = 0.02;
        let init = Init::Normal { std };
        let into_residual = Init::Normal { std: std / (2.0 * layers as f64).sqrt() };
        let zeros = Some(Init::Constant(0.0));
        let up = Linear::with_init(hidden, 4 * hidden, zeros, init, options)?;
        let down = Linear::with_init(4 * hidden, hidden, zeros, into_residual, options)?;
        let attn = SelfAttention {
            c_attn: Box::new(Linear::with_init(hidden, 3 * hidden, zeros, init, options)?),
            c_proj: Box::new(Linear::with_init(hidden, hidden, zeros, into_residual, options)?),
            heads,
            dropout,
            path: attention,
        };
        Ok(Self {
            ln_1: LayerNorm::new(hidden, 1e-5, options)?,
            attn: Box::new(attn),
            ln_2: LayerNorm::new(hidden, 1e-5, options)?,
            mlp: Box::new(FeedForward::new(["c_fc", "c_proj"], up, down, Activation::GeluTanh, 0.0)),
            dropout,
        })
    }
}

impl Module for Gpt2Block {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("ln_1", &self.ln_1);
        visitor.part("attn", &*self.attn);
        visitor.part("ln_2", &self.ln_2);
        visitor.part("mlp", &*self.mlp);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.part("ln_1", &mut self.ln_1)?;
        visitor.attention("attn", &mut self.attn)?;
        visitor.part("ln_2", &mut self.ln_2)?;
        visitor.mlp("mlp", &mut self.mlp)
    }
}

impl Block for Gpt2Block {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let rate = if context.training { self.dropout } else { 0.0 };
        let update = self.attn.forward(&self.ln_1.forward(x_btd)?, context)?;
        let update = dropout(update, rate, context.training)?;
        let (x, normed) = self.ln_2.add(x_btd, &update)?;
        drop(update);
        let update = self.mlp.forward(&normed, context)?;
        drop(normed);
        Ok(x.f_add(&dropout(update, rate, context.training)?)?)
    }
}

#[derive(Debug)]
struct SelfAttention {
    c_attn: Box<dyn Projection>,
    c_proj: Box<dyn Projection>,
    heads: i64,
    dropout: f64,
    path: AttentionPath,
}

impl Module for SelfAttention {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("c_attn", &*self.c_attn);
        visitor.part("c_proj", &*self.c_proj);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.projection("c_attn", &mut self.c_attn)?;
        visitor.projection("c_proj", &mut self.c_proj)
    }
}

impl Attention for SelfAttention {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let rate = if context.training { self.dropout } else { 0.0 };
        let [q, k, v] = split_heads(&self.c_attn.forward(x_btd, context)?, self.heads)?;
        let options = AttentionConfig { path: self.path, dropout: rate, ..AttentionConfig::default() };
        let attended = attention_within(context, [q, k, v], &options)?;
        self.c_proj.forward(&attended, context)
    }
}
