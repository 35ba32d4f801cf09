//! Wrappers of blocks, and of their attention and MLP, that read their layer's activation plan from a [`Switch`] in each forward, and run as
//! checkpoint segments if the plan says so.

use std::sync::Arc;

use models::Result;
use models::module::{
    Attention, Block, Context, FunctionalCall, Mlp, MlpFunction, Module, OwnedContext, Replaceable, Visitor,
    VisitorMut, one, replace,
};
use runtime::autograd::Checkpoint;
use tch::Tensor;

use super::host_offload::LayerStorage;
use super::{LayerPlan, Switch};

/// Wraps the part's `forward` as a checkpoint segment.
fn segment<P: Module + Send + ?Sized + 'static>(
    part: &FunctionalCall<P>,
    context: &Context<'_>,
    forward: impl Fn(&P, &[&Tensor], &Context<'_>) -> Result<Vec<Tensor>> + Send + 'static,
) -> impl Fn(&[&Tensor]) -> runtime::Result<Vec<Tensor>> + Send + 'static {
    let (part, context) = (part.shared(), OwnedContext::from(context));
    move |values: &[&Tensor]| part.run(|part| forward(part, values, &context.borrow()))
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
        replace(slot, |block| Box::new(Self { block: FunctionalCall::new(name, block), switch, storage }));
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
        one(self.forward_with(&[x_btd], context)?)
    }

    fn forward_with(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>> {
        let plan = self.switch.get();
        // These plans keep everything, or recompute a part, which [`Switched`] does.
        let runs_without_segment =
            matches!(plan, LayerPlan::KeepAll | LayerPlan::RecomputeMlp | LayerPlan::RecomputeAttention);
        if runs_without_segment || !self.block.records(values) {
            return self.block.forward_with(values, context);
        }
        let segment =
            segment(&self.block, context, |block, values, context| block.forward_with(values, context));
        let options =
            Checkpoint { retain_products: plan == LayerPlan::RecomputeElementwise, ..Checkpoint::default() };
        let storage = (plan == LayerPlan::Offload).then(|| Arc::new(self.storage.clone()) as _);
        options.run_any_with_storage(segment, values, storage)
    }
}

/// A part of a block, attention or MLP, that one of the plans recomputes alone.
pub(super) trait Part: Module + Replaceable + 'static {
    /// The plan that recomputes this part alone.
    const RECOMPUTED_BY: LayerPlan;

    /// Runs the part's forward.
    fn compute(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>>;
}

impl Part for dyn Attention {
    const RECOMPUTED_BY: LayerPlan = LayerPlan::RecomputeAttention;

    fn compute(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>> {
        self.forward_with(values, context)
    }
}

impl Part for dyn Mlp {
    const RECOMPUTED_BY: LayerPlan = LayerPlan::RecomputeMlp;

    fn compute(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>> {
        values.iter().map(|x| self.forward(x, context)).collect()
    }
}

/// A part with its block's switchable plan.
#[derive(Debug)]
pub(super) struct Switched<P: ?Sized> {
    part: FunctionalCall<P>,
    switch: Switch,
}

impl<P: Part + ?Sized> Switched<P> {
    /// Takes ownership of a part.
    pub(super) fn new(name: &str, part: Box<P>, switch: Switch) -> Self {
        Self { part: FunctionalCall::new(name, part), switch }
    }

    fn run(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>> {
        if self.switch.get() != P::RECOMPUTED_BY || !self.part.records(values) {
            return self.part.shared().run(|part| part.compute(values, context));
        }
        Checkpoint::default().run_any(segment(&self.part, context, P::compute), values)
    }
}

impl<P: Part + ?Sized> Module for Switched<P> {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        self.part.visit(visitor);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        self.part.visit_mut(visitor)
    }
}

impl Attention for Switched<dyn Attention> {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        one(self.run(&[x_btd], context)?)
    }

    fn forward_with(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>> {
        self.run(values, context)
    }
}

impl Mlp for Switched<dyn Mlp> {
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        one(self.run(&[x], context)?)
    }

    /// Returns no function by which a technique replaces an MLP: the replacement would lose the switch.
    fn function(&self) -> MlpFunction {
        match self.part.shared().run(|mlp| mlp.function()) {
            MlpFunction::Recomputed => MlpFunction::Recomputed,
            _ => MlpFunction::Other,
        }
    }
}
