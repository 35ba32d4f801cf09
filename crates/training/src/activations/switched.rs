//! Blocks, attentions and MLPs that follow a switchable plan.

use std::sync::Arc;

use models::Result;
use models::module::{
    Attention, Block, Context, FunctionalCall, Mlp, MlpForm, Module, OwnedContext, Visitor, VisitorMut,
    replace_attention, replace_block, replace_mlp,
};
use runtime::autograd::Checkpoint;
use tch::Tensor;

use super::host_offload::LayerStorage;
use super::{LayerPlan, Switch};

/// Wraps the part's `forward` as a checkpoint segment.
fn segment<P: Module + Send + ?Sized + 'static>(
    held: &FunctionalCall<P>,
    context: &Context<'_>,
    forward: impl Fn(&P, &Tensor, &Context<'_>) -> Result<Tensor> + Send + 'static,
) -> impl Fn(&[Tensor]) -> runtime::Result<Vec<Tensor>> + Send + 'static {
    let (part, context) = (held.shared(), OwnedContext::from(context));
    move |x| Ok(vec![part.run(|part| forward(part, &x[0], &context.borrow()))?])
}

/// A block with a switchable plan.
#[derive(Debug)]
pub(super) struct SwitchedBlock {
    block: FunctionalCall<dyn Block>,
    switch: Switch,
    storage: LayerStorage,
}

impl SwitchedBlock {
    /// Wraps the block of `slot`.
    pub(super) fn install(slot: &mut Box<dyn Block>, name: &str, switch: Switch, storage: LayerStorage) {
        replace_block(slot, |block| {
            Box::new(Self { block: FunctionalCall::new(name, block), switch, storage })
        });
    }
}

impl Module for SwitchedBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        self.block.visit(visitor);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        self.block.visit_mut(visitor)
    }
}

impl Block for SwitchedBlock {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let plan = self.switch.get();
        let whole =
            matches!(plan, LayerPlan::KeepAll | LayerPlan::RecomputeMlp | LayerPlan::RecomputeAttention);
        if whole || !self.block.records(x_btd) {
            return self.block.shared().run(|block| block.forward(x_btd, context));
        }
        let segment = segment(&self.block, context, |block, x, context| block.forward(x, context));
        let options =
            Checkpoint { retain_products: plan == LayerPlan::RecomputeElementwise, ..Checkpoint::default() };
        let mut outputs = match plan {
            LayerPlan::Offload => {
                options.run_with_storage(segment, &[x_btd], Arc::new(self.storage.clone()))?
            }
            _ => options.run(segment, &[x_btd])?,
        };
        Ok(outputs.remove(0))
    }
}

/// An attention with its block's switchable plan.
#[derive(Debug)]
pub(super) struct SwitchedAttention {
    attention: FunctionalCall<dyn Attention>,
    switch: Switch,
}

impl SwitchedAttention {
    /// Wraps the attention of `slot`.
    pub(super) fn install(slot: &mut Box<dyn Attention>, name: &str, switch: Switch) {
        replace_attention(slot, |attention| {
            Box::new(Self { attention: FunctionalCall::new(name, attention), switch })
        });
    }
}

impl Module for SwitchedAttention {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        self.attention.visit(visitor);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        self.attention.visit_mut(visitor)
    }
}

impl Attention for SwitchedAttention {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        if self.switch.get() != LayerPlan::RecomputeAttention || !self.attention.records(x_btd) {
            return self.attention.shared().run(|attention| attention.forward(x_btd, context));
        }
        let segment =
            segment(&self.attention, context, |attention, x, context| attention.forward(x, context));
        Ok(Checkpoint::default().run(segment, &[x_btd])?.remove(0))
    }
}

/// An MLP with its block's switchable plan.
#[derive(Debug)]
pub(super) struct SwitchedMlp {
    mlp: FunctionalCall<dyn Mlp>,
    switch: Switch,
}

impl SwitchedMlp {
    /// Wraps the MLP of `slot`.
    pub(super) fn install(slot: &mut Box<dyn Mlp>, name: &str, switch: Switch) {
        replace_mlp(slot, |mlp| Box::new(Self { mlp: FunctionalCall::new(name, mlp), switch }));
    }
}

impl Module for SwitchedMlp {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        self.mlp.visit(visitor);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        self.mlp.visit_mut(visitor)
    }
}

impl Mlp for SwitchedMlp {
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        if self.switch.get() != LayerPlan::RecomputeMlp || !self.mlp.records(x) {
            return self.mlp.shared().run(|mlp| mlp.forward(x, context));
        }
        let segment = segment(&self.mlp, context, |mlp, x, context| mlp.forward(x, context));
        Ok(Checkpoint::default().run(segment, &[x])?.remove(0))
    }

    /// Nothing that can be replaced: the switch would be lost.
    fn form(&self) -> MlpForm {
        match self.mlp.shared().run(|mlp| mlp.form()) {
            MlpForm::Recomputed => MlpForm::Recomputed,
            _ => MlpForm::Other,
        }
    }
}
