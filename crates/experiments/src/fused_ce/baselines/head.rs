//! The head of a model whose loss is computed by any of the implementations.

use fused_ce::{Chunk, LinearCrossEntropy, Reduction};
use kernels::linear::linear;
use models::module::{
    Context, LossHead, LossOutput, Module, ModuleMapper, Visitor, VisitorMut, map_modules, tensors,
};
use tch::Tensor;

use super::Implementation;

/// Gives `model` a head whose loss is computed by `implementation`, in the place of its own, whose weight it trains.
///
/// # Errors
/// A head that is not one projection's weight.
pub fn install(
    model: &mut dyn Module,
    implementation: Implementation,
    chunk: Option<Chunk>,
) -> anyhow::Result<()> {
    if let Some(options) = implementation.options() {
        return Ok(LinearCrossEntropy { chunk, ..options }.install(model)?);
    }
    Ok(map_modules(model, &mut Install { implementation, chunk })?)
}

struct Install {
    implementation: Implementation,
    chunk: Option<Chunk>,
}

impl ModuleMapper for Install {
    fn loss_head(&mut self, name: &str, slot: &mut Box<dyn LossHead>) -> models::Result<()> {
        let weight = match tensors(&**slot).as_slice() {
            [weight] if weight.name == "weight" => weight.tensor.shallow_clone(),
            _ => return Err(refused(format!("the head `{name}` is not one projection's weight"))),
        };
        let &mut Self { implementation, chunk } = self;
        *slot = Box::new(Head { weight, implementation, chunk });
        Ok(())
    }
}

#[derive(Debug)]
struct Head {
    weight: Tensor,
    implementation: Implementation,
    chunk: Option<Chunk>,
}

impl Module for Head {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter("weight", &self.weight);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
        visitor.parameter("weight", &mut self.weight)
    }
}

impl LossHead for Head {
    fn logits(&self, hidden_btd: &Tensor, _: &Context<'_>) -> models::Result<Tensor> {
        linear(hidden_btd, &self.weight, None)
    }

    fn loss(
        &self,
        hidden_btd: &Tensor,
        labels_bt: &Tensor,
        context: &Context<'_>,
    ) -> models::Result<LossOutput> {
        if context.accuracy {
            return Err(refused(format!("`{}` computes no accuracy", self.implementation)));
        }
        let inputs = [hidden_btd, &self.weight, labels_bt];
        let sum = self.implementation.loss(inputs, context.labelled_tokens, Reduction::Sum, self.chunk);
        Ok(LossOutput { sum: sum?, correct: None })
    }
}

fn refused(why: String) -> models::Error {
    models::Error::Other(why.into())
}
