//! A projection whose result is unused.

use models::Linear;
use models::module::{Input, LanguageModel, LossHead, Module, Projection, Visitor, VisitorMut};
use tch::{Device, Kind, Tensor};

/// A model with a second projection of its hidden states, `hidden_projector2`, computed in each forward and dropped. Its
/// weights never get a gradient.
#[derive(Debug)]
pub struct UnusedProjection<M> {
    model: M,
    unused: Linear,
}

impl<M: LanguageModel> UnusedProjection<M> {
    /// Puts a projection of `width` by `width` beside the model.
    ///
    /// # Errors
    /// A width below 1.
    pub fn new(model: M, width: i64, options: (Kind, Device)) -> models::Result<Self> {
        Ok(Self { model, unused: Linear::new(width, width, true, options)? })
    }
}

impl<M: LanguageModel> Module for UnusedProjection<M> {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("", &self.model);
        visitor.part("hidden_projector2", &self.unused);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
        visitor.part("", &mut self.model)?;
        visitor.part("hidden_projector2", &mut self.unused)
    }
}

impl<M: LanguageModel> LanguageModel for UnusedProjection<M> {
    fn hidden(&self, input: &Input<'_>) -> models::Result<Tensor> {
        let hidden = self.model.hidden(input)?;
        drop(self.unused.forward(&hidden, &input.context)?);
        Ok(hidden)
    }

    fn head(&self) -> &dyn LossHead {
        self.model.head()
    }

    fn vocabulary(&self) -> i64 {
        self.model.vocabulary()
    }

    fn max_sequence(&self) -> i64 {
        self.model.max_sequence()
    }
}
