//! Blocks and MLPs that run as their switch says.

use std::sync::Arc;

use models::module::{Block, Context, Editor, Mlp, Module, OwnedContext, Role, Visitor, tensors};
use models::{Error, Result};
use parking_lot::ReentrantMutex;
use runtime::autograd::{Checkpoint, GradMode};
use tch::Tensor;

use super::host_lane::Stop;
use super::{LayerPlan, Switch};

/// A part that graphs may hold on to. A segment's closure outlives the borrow of the model, and a backward may run on another
/// thread, while tensors are not `Sync`: so the part lies behind a lock that the same thread may take again.
#[derive(Debug)]
struct Held<P: ?Sized> {
    name: String,
    part: Arc<ReentrantMutex<Box<P>>>,
    /// Handles of the part's tensors, for those who only read the model: the same tensors, gradients and all.
    named: Vec<(String, Tensor, Role)>,
}

impl<P: Module + ?Sized> Held<P> {
    fn new(name: &str, part: Box<P>) -> Self {
        let named = handles(&*part);
        Self { name: name.to_owned(), part: Arc::new(ReentrantMutex::new(part)), named }
    }

    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        for (name, tensor, role) in &self.named {
            match role {
                Role::Parameter => visitor.parameter(name, tensor),
                Role::Buffer => visitor.buffer(name, tensor),
            }
        }
    }

    fn visit_mut(&mut self, editor: &mut Editor<'_>) -> Result<()> {
        let part = Arc::get_mut(&mut self.part).ok_or_else(|| Error::Config {
            what: "activation plan",
            reason: format!(
                "a graph whose backward has not run holds `{}`; run backward, or drop the loss, before the model is changed",
                self.name
            ),
        })?;
        let result = part.get_mut().visit_mut(editor);
        self.named = handles(&**part.get_mut());
        result
    }

    /// Whether a run on `x` is worth running again: gradients are recorded, and something in it needs one.
    fn records(&self, x: &Tensor) -> bool {
        GradMode::enabled()
            && (x.requires_grad() || self.named.iter().any(|(_, tensor, _)| tensor.requires_grad()))
    }

    /// The part's `forward` as a segment.
    fn segment(
        &self,
        context: &Context<'_>,
        forward: impl Fn(&P, &Tensor, &Context<'_>) -> Result<Tensor> + Send + 'static,
    ) -> impl Fn(&[Tensor]) -> runtime::Result<Vec<Tensor>> + Send + 'static
    where
        P: Send + 'static,
    {
        let (part, context) = (self.part.clone(), OwnedContext::from(context));
        move |x| {
            let y = forward(&**part.lock(), &x[0], &context.borrow()).map_err(|error| match error {
                Error::Runtime(error) => error,
                other => runtime::Error::Other(Box::new(other)),
            })?;
            Ok(vec![y])
        }
    }
}

fn handles(part: &(impl Module + ?Sized)) -> Vec<(String, Tensor, Role)> {
    tensors(part).into_iter().map(|named| (named.name, named.tensor.shallow_clone(), named.role)).collect()
}

/// The one output of a segment, or the model's own error.
fn output(outputs: runtime::Result<Vec<Tensor>>) -> Result<Tensor> {
    match outputs {
        Ok(mut outputs) => Ok(outputs.remove(0)),
        Err(runtime::Error::Other(error)) => Err(error
            .downcast::<Error>()
            .map_or_else(|error| runtime::Error::Other(error).into(), |error| *error)),
        Err(error) => Err(error.into()),
    }
}

/// A block behind a switch.
#[derive(Debug)]
pub(super) struct SwitchedBlock {
    block: Held<dyn Block>,
    switch: Switch,
    stop: Stop,
}

impl SwitchedBlock {
    /// Puts the block of `slot` behind `switch`.
    pub(super) fn install(slot: &mut Box<dyn Block>, name: &str, switch: Switch, stop: Stop) {
        let block: Box<dyn Block> = std::mem::replace(slot, Box::new(Vacant));
        let block = Held::new(name, block);
        *slot = Box::new(Self { block, switch, stop });
    }
}

impl Module for SwitchedBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        self.block.visit(visitor);
    }

    fn visit_mut(&mut self, editor: &mut Editor<'_>) -> Result<()> {
        self.block.visit_mut(editor)
    }
}

impl Block for SwitchedBlock {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let plan = self.switch.get();
        let whole = matches!(plan, LayerPlan::KeepAll | LayerPlan::RecomputeMlp);
        if whole || !self.block.records(x_btd) {
            return self.block.part.lock().forward(x_btd, context);
        }
        let segment = self.block.segment(context, |block, x, context| block.forward(x, context));
        let options =
            Checkpoint { retain_products: plan == LayerPlan::RecomputeElementwise, ..Checkpoint::default() };
        output(match plan {
            LayerPlan::Offload => options.run_parked(segment, &[x_btd], Arc::new(self.stop.clone())),
            _ => options.run(segment, &[x_btd]),
        })
    }
}

/// An MLP behind its block's switch.
#[derive(Debug)]
pub(super) struct SwitchedMlp {
    mlp: Held<dyn Mlp>,
    switch: Switch,
}

impl SwitchedMlp {
    /// Puts the MLP of `slot` behind `switch`.
    pub(super) fn install(slot: &mut Box<dyn Mlp>, name: &str, switch: Switch) {
        let mlp: Box<dyn Mlp> = std::mem::replace(slot, Box::new(Vacant));
        let mlp = Held::new(name, mlp);
        *slot = Box::new(Self { mlp, switch });
    }
}

impl Module for SwitchedMlp {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        self.mlp.visit(visitor);
    }

    fn visit_mut(&mut self, editor: &mut Editor<'_>) -> Result<()> {
        self.mlp.visit_mut(editor)
    }
}

impl Mlp for SwitchedMlp {
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        if self.switch.get() != LayerPlan::RecomputeMlp || !self.mlp.records(x) {
            return self.mlp.part.lock().forward(x, context);
        }
        let segment = self.mlp.segment(context, |mlp, x, context| mlp.forward(x, context));
        output(Checkpoint::default().run(segment, &[x]))
    }
}

/// What is in a slot while its part is taken out.
#[derive(Debug)]
struct Vacant;

impl Module for Vacant {
    fn visit<'a>(&'a self, _: &mut Visitor<'a, '_>) {}

    fn visit_mut(&mut self, _: &mut Editor<'_>) -> Result<()> {
        Ok(())
    }
}

impl Block for Vacant {
    fn forward(&self, x: &Tensor, _: &Context<'_>) -> Result<Tensor> {
        Ok(x.shallow_clone())
    }
}

impl Mlp for Vacant {
    fn forward(&self, x: &Tensor, _: &Context<'_>) -> Result<Tensor> {
        Ok(x.shallow_clone())
    }
}
