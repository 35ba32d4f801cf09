//! What each layer of a Gemma 4 gets of a token besides the residual stream.
//!
//! For tokens i, their embedded rows e (with their factor), L layers of width P:
//!
//! ```text
//! p = (norm(per_layer_model_projection(e)/√H) + √P·embed_tokens_per_layer[i])/√2        [L, P] for each token
//! x = x + norm(per_layer_projection(GELU(per_layer_input_gate(x)) ⊙ pₗ))                at the end of layer l
//! ```
//!
//! p is computed once for all layers; each gets its part as a value of its own ([`Block::forward_with`](crate::module::Block::forward_with)).

use decoder::{
    Gemma4, PER_LAYER_EMBEDDING, PER_LAYER_GATE, PER_LAYER_MODEL_PROJECTION, PER_LAYER_NORM,
    PER_LAYER_PROJECTION, POST_PER_LAYER_NORM,
};
use kernels::quantized::blocks;
use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

use super::{DecoderConfig, norm, rounded_root};
use crate::embedding::Embedding;
use crate::error::Result;
use crate::init::Init;
use crate::linear::{Linear, dense_kind, placeholder};
use crate::module::{Context, Module, Projection, Visitor, VisitorMut};
use crate::norm::RmsNorm;

/// The second embedding, and the projection of the first to its width.
#[derive(Debug)]
pub(super) struct PerLayerEmbedding {
    embed_tokens: Embedding,
    projection: Box<dyn Projection>,
    norm: RmsNorm,
    hidden: i64,
    /// The numbers of layers and of a layer's columns.
    parts: [i64; 2],
}

impl PerLayerEmbedding {
    /// Returns `None` for a model without one.
    pub(super) fn new(config: &DecoderConfig, init: Init, options: (Kind, Device)) -> Result<Option<Self>> {
        let Some(Gemma4 { per_layer_input: width, per_layer_vocabulary: rows, .. }) =
            config.gemma4.filter(|gemma4| gemma4.per_layer_input > 0)
        else {
            return Ok(None);
        };
        let all = config.num_hidden_layers * width;
        let dense = (dense_kind(options.0), options.1);
        Ok(Some(Self {
            embed_tokens: match options.0 == blocks::KIND {
                true => Embedding::from(placeholder(rows, options.1)?),
                false => Embedding::new(rows, all, init, dense)?,
            },
            projection: Box::new(Linear::with_init(config.hidden_size, all, None, init, options)?),
            norm: norm(config, width, options)?,
            hidden: config.hidden_size,
            parts: [config.num_hidden_layers, width],
        }))
    }

    /// Returns each layer's part `[batch, sequence, P]` for `tokens` `[batch, sequence]`, whose rows of the first embedding are `embedded`
    /// `[batch, sequence, hidden]`.
    pub(super) fn inputs(
        &self,
        tokens: &Tensor,
        embedded: &Tensor,
        context: &Context<'_>,
    ) -> Result<Vec<Tensor>> {
        let [layers, width] = self.parts;
        let (batch, sequence) = tokens.size2()?;
        let by_layer = |x: Tensor| x.f_view([batch, sequence, layers, width]);
        let projected = self.projection.forward(embedded, context)?;
        let projected = projected.try_mul_scalar((self.hidden as f64).powf(-0.5))?;
        let projected = self.norm.forward(&by_layer(projected)?)?;
        let rows = self.embed_tokens.forward(tokens)?;
        let scale = rounded_root(width, rows.kind());
        let rows = by_layer(rows.try_mul_scalar(scale)?)?;
        let both = projected.f_add(&rows)?.try_mul_scalar(0.5f64.sqrt())?;
        // One node, whose backward makes the gradient of all in one tensor.
        Ok(both.f_unbind(2)?)
    }
}

/// Its parts appear beside those of the model.
impl Module for PerLayerEmbedding {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part(PER_LAYER_EMBEDDING, &self.embed_tokens);
        visitor.part(PER_LAYER_MODEL_PROJECTION, &*self.projection);
        visitor.part(PER_LAYER_NORM, &self.norm);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.embedding(PER_LAYER_EMBEDDING, &mut self.embed_tokens)?;
        visitor.projection(PER_LAYER_MODEL_PROJECTION, &mut self.projection)?;
        visitor.part(PER_LAYER_NORM, &mut self.norm)
    }
}

/// The part of a block that adds its layer's input.
#[derive(Debug)]
pub(super) struct PerLayerInput {
    gate: Box<dyn Projection>,
    projection: Box<dyn Projection>,
    norm: RmsNorm,
}

impl PerLayerInput {
    /// Returns `None` for a model without a second embedding.
    pub(super) fn new(config: &DecoderConfig, init: Init, options: (Kind, Device)) -> Result<Option<Self>> {
        let width = config.gemma4.map_or(0, |gemma4| gemma4.per_layer_input);
        if width == 0 {
            return Ok(None);
        }
        let hidden = config.hidden_size;
        let linear = |from, to| -> Result<Box<dyn Projection>> {
            Ok(Box::new(Linear::with_init(from, to, None, init, options)?))
        };
        Ok(Some(Self {
            gate: linear(hidden, width)?,
            projection: linear(width, hidden)?,
            norm: norm(config, hidden, options)?,
        }))
    }

    /// Returns x with what the layer's input adds to it.
    pub(super) fn add(&self, x_btd: &Tensor, input_btp: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let gate = self.gate.forward(x_btd, context)?.f_gelu("tanh")?;
        let update = self.projection.forward(&gate.f_mul(input_btp)?, context)?;
        Ok(x_btd.f_add(&self.norm.forward(&update)?)?)
    }
}

impl Module for PerLayerInput {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part(PER_LAYER_GATE, &*self.gate);
        visitor.part(PER_LAYER_PROJECTION, &*self.projection);
        visitor.part(POST_PER_LAYER_NORM, &self.norm);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.projection(PER_LAYER_GATE, &mut self.gate)?;
        visitor.projection(PER_LAYER_PROJECTION, &mut self.projection)?;
        visitor.part(POST_PER_LAYER_NORM, &mut self.norm)
    }
}
