//! A loss that the host reads in each step.

use models::module::{Context, LossHead, LossOutput, Module, Visitor, VisitorMut};
use tch::Tensor;

/// Calls `.item()` on the loss, and on the count of right predictions where there is one, as a script does that prints both
/// for every batch. The host then waits for all work that is queued on the device.
#[derive(Debug)]
pub struct HostReadsHead(pub Box<dyn LossHead>);

impl Module for HostReadsHead {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("", &*self.0);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
        visitor.loss_head("", &mut self.0)
    }
}

impl LossHead for HostReadsHead {
    fn logits(&self, hidden_btd: &Tensor, context: &Context<'_>) -> models::Result<Tensor> {
        self.0.logits(hidden_btd, context)
    }

    fn loss(
        &self,
        hidden_btd: &Tensor,
        labels_bt: &Tensor,
        context: &Context<'_>,
    ) -> models::Result<LossOutput> {
        let output = self.0.loss(hidden_btd, labels_bt, context)?;
        output.sum.f_double_value(&[])?;
        if let Some(correct) = &output.correct {
            correct.f_double_value(&[])?;
        }
        Ok(output)
    }
}
