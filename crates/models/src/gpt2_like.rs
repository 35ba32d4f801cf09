//! The GPT-2-like model of the training assignment.
//!
//! tokens → embedding `[b, t, e]` → + positional encoding → projection to `[b, t, d]` → one
//! [`TransformerDecoderLayer`] with its own input as memory → projection to the vocabulary. Both attentions are always causal;
//! the assignment's own script leaks the future if the loader provides no mask.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::attention::AttentionPath;
use crate::decoder_layer::TransformerDecoderLayer;
use crate::embedding::{Embedding, noisy};
use crate::error::Result;
use crate::init::Init;
use crate::linear::{Linear, positive};
use crate::loss_head::ProjectionHead;
use crate::module::{Block, Input, LanguageModel, LossHead, Module, Projection, Visitor, VisitorMut};
use crate::norm::NormKernel;
use crate::position::PositionalEncoding;

/// Sizes of a [`Gpt2Like`], named as in its `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gpt2LikeConfig {
    /// Vocabulary size.
    pub vocab_size: i64,
    /// Width of the embeddings.
    pub embedding_dim: i64,
    /// Width of the decoder layer.
    pub hidden_dim: i64,
    /// Number of heads of both attentions; they divide `hidden_dim`.
    pub num_heads: i64,
    /// Inner width of the MLP.
    pub ff_dim: i64,
    /// Maximum sequence length.
    pub max_length: i64,
    /// Dropout probability of activations and attention weights in training.
    #[serde(default)]
    pub dropout: f64,
    /// How attention is computed.
    #[serde(skip)]
    pub attention: AttentionPath,
    /// The implementation of the norms.
    #[serde(skip)]
    pub norms: NormKernel,
}

impl Default for Gpt2LikeConfig {
    /// The assignment's sizes: BERT's vocabulary, 1024 wide, 8 heads, rows of 512. (The assignment's 1023 is not divisible by
    /// its 8 heads.)
    fn default() -> Self {
        Self {
            vocab_size: 30522,
            embedding_dim: 1024,
            hidden_dim: 1024,
            num_heads: 8,
            ff_dim: 2048,
            max_length: 512,
            dropout: 0.1,
            attention: AttentionPath::Fused,
            norms: NormKernel::Fused,
        }
    }
}

/// The model. See the [module](self).
#[derive(Debug)]
pub struct Gpt2Like {
    embedding: Embedding,
    positions: PositionalEncoding,
    hidden_projector: Box<dyn Projection>,
    decoder: Box<dyn Block>,
    head: Box<dyn LossHead>,
    config: Gpt2LikeConfig,
}

impl Gpt2Like {
    /// Creates a model with PyTorch's initialisation of each part.
    ///
    /// # Errors
    /// A size below 1, a width that the heads do not divide, a dropout outside [0, 1).
    pub fn new(config: &Gpt2LikeConfig, options: (Kind, Device)) -> Result<Self> {
        let &Gpt2LikeConfig {
            vocab_size,
            embedding_dim,
            hidden_dim,
            num_heads,
            ff_dim,
            max_length,
            dropout,
            attention,
            norms,
        } = config;
        let sizes = [
            ("vocab_size", vocab_size),
            ("embedding_dim", embedding_dim),
            ("hidden_dim", hidden_dim),
            ("num_heads", num_heads),
            ("ff_dim", ff_dim),
            ("max_length", max_length),
        ];
        positive("GPT-2-like model", &sizes)?;
        let decoder =
            TransformerDecoderLayer::new(hidden_dim, num_heads, ff_dim, dropout, attention, options)?;
        let decoder = decoder.with_norms(norms);
        let head = ProjectionHead::new(Linear::new(hidden_dim, vocab_size, true, options)?);
        Ok(Self {
            embedding: Embedding::new(vocab_size, embedding_dim, Init::Normal { std: 1.0 }, options)?,
            positions: PositionalEncoding::new(max_length, embedding_dim, options)?,
            hidden_projector: Box::new(Linear::new(embedding_dim, hidden_dim, true, options)?),
            decoder: Box::new(decoder),
            head: Box::new(head),
            config: config.clone(),
        })
    }
}

impl Module for Gpt2Like {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("embedding", &self.embedding);
        visitor.part("hidden_projector", &*self.hidden_projector);
        visitor.part("decoder", &*self.decoder);
        visitor.part("output_linear", &*self.head);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.embedding("embedding", &mut self.embedding)?;
        visitor.projection("hidden_projector", &mut self.hidden_projector)?;
        visitor.block("decoder", &mut self.decoder)?;
        visitor.loss_head("output_linear", &mut self.head)
    }
}

impl LanguageModel for Gpt2Like {
    fn hidden(&self, input: &Input<'_>) -> Result<Tensor> {
        let embedded = noisy(self.embedding.forward(input.tokens)?, &input.context)?;
        let embedded = self.positions.forward(&embedded, input.positions)?;
        self.decoder.forward(&self.hidden_projector.forward(&embedded, &input.context)?, &input.context)
    }

    fn head(&self) -> &dyn LossHead {
        &*self.head
    }

    fn config(&self) -> serde_json::Value {
        serde_json::to_value(&self.config).unwrap_or_default()
    }

    fn vocabulary(&self) -> i64 {
        self.config.vocab_size
    }

    fn max_sequence(&self) -> i64 {
        self.positions.max_length()
    }
}
