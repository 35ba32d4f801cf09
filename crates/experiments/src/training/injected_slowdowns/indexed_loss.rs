//! A loss that picks the labelled rows by a boolean index.

use models::module::{Context, IGNORE_INDEX, LossHead, LossOutput, Module, Visitor, VisitorMut};
use tch::{Kind, Reduction, Tensor};

/// Gives the same loss as the head within it, through `logits[labels != IGNORE_INDEX]`: a copy of most of the logits forward,
/// a scatter into zeros backward, and, because the number of rows is data, a wait for the device.
#[derive(Debug)]
pub struct IndexedLossHead(pub Box<dyn LossHead>);

impl Module for IndexedLossHead {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("", &*self.0);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
        visitor.loss_head("", &mut self.0)
    }
}

impl LossHead for IndexedLossHead {
    fn logits(&self, hidden_btd: &Tensor, context: &Context<'_>) -> models::Result<Tensor> {
        self.0.logits(hidden_btd, context)
    }

    fn loss(
        &self,
        hidden_btd: &Tensor,
        labels_bt: &Tensor,
        context: &Context<'_>,
    ) -> models::Result<LossOutput> {
        let logits = self.0.logits(hidden_btd, context)?.f_flatten(0, 1)?;
        let labels = labels_bt.f_reshape([-1])?;
        let labelled = labels.f_ne(IGNORE_INDEX)?;
        let (logits, labels) = (logits.f_index(&[Some(&labelled)])?, labels.f_index(&[Some(&labelled)])?);
        let sum = logits.f_cross_entropy_loss(&labels, None::<&Tensor>, Reduction::Sum, IGNORE_INDEX, 0.0)?;
        let correct = if context.accuracy {
            let _no_grad = tch::no_grad_guard();
            Some(logits.f_argmax(-1, false)?.f_eq_tensor(&labels)?.f_sum(Kind::Int64)?)
        } else {
            None
        };
        Ok(LossOutput { sum, correct })
    }
}
