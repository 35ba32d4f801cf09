//! The two-layer MLP of the transformer.

use tch::{Device, Kind, Tensor};

use crate::activation::Activation;
use crate::dropout::dropout;
use crate::error::Result;
use crate::linear::Linear;
use crate::module::{Context, Mlp, MlpFunction, Module, Projection, Visitor, VisitorMut};

/// y = f(x·W₁ᵀ + b₁)·W₂ᵀ + b₂, with dropout if the original model has it.
#[derive(Debug)]
pub struct FeedForward {
    names: [&'static str; 2],
    up: Box<dyn Projection>,
    down: Box<dyn Projection>,
    activation: Activation,
    /// Dropout of the activations, before the second layer.
    inner_dropout: f64,
}

impl FeedForward {
    /// Creates an MLP of two layers with the given names.
    pub fn new(
        names: [&'static str; 2],
        up: Linear,
        down: Linear,
        activation: Activation,
        inner_dropout: f64,
    ) -> Self {
        Self { names, up: Box::new(up), down: Box::new(down), activation, inner_dropout }
    }

    /// Creates the MLP of PyTorch's `TransformerDecoderLayer`: `linear1`, ReLU, dropout, `linear2`, with the weights of
    /// `nn.Linear`.
    ///
    /// # Errors
    /// A width below 1.
    pub fn torch(hidden: i64, inner: i64, dropout: f64, options: (Kind, Device)) -> Result<Self> {
        let up = Linear::new(hidden, inner, true, options)?;
        let down = Linear::new(inner, hidden, true, options)?;
        Ok(Self::new(["linear1", "linear2"], up, down, Activation::Relu, dropout))
    }
}

impl Module for FeedForward {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part(self.names[0], &*self.up);
        visitor.part(self.names[1], &*self.down);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.projection(self.names[0], &mut self.up)?;
        visitor.projection(self.names[1], &mut self.down)
    }
}

impl Mlp for FeedForward {
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let inner = self.activation.apply(&self.up.forward(x, context)?)?;
        self.down.forward(&dropout(inner, self.inner_dropout, context.training)?, context)
    }

    fn function(&self) -> MlpFunction {
        let &Self { names, activation, inner_dropout: dropout, .. } = self;
        MlpFunction::FeedForward { names, activation, dropout }
    }
}
