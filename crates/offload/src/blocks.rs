//! The ladder: a block of any model, offloaded in four ways, each a type that stands in the block's place.
//!
//! | type | comes and goes | backward | holds on the device |
//! |---|---|---|---|
//! | [`OffloadBlock`] | when it runs | – | one layer |
//! | [`OffloadBlockWithCheckpointing`] | when it runs | a recomputed segment ([`runtime::autograd::checkpoint`]) | one layer, and x of each |
//! | [`OffloadBlockWithFunction`] | when it runs | a function of its own | one layer, and x of each |
//! | [`OverlapOffloadBlock`] | ahead of time, in a ring | a function of its own | the ring, and x of each |
//!
//! Names of tensors, and the tensors themselves, stay the block's own: an optimizer, a checkpoint and an adapter see the model as it
//! was, at home. [`Offload`](crate::Offload) puts these in.

use models::Result;
use models::module::{Block, Context, FunctionalCall, Module, OwnedContext, Visitor, VisitorMut};
use runtime::autograd::{Checkpoint, GradMode, apply};
use tch::Tensor;

use crate::engine::{Engine, Fetched, Lease};
use crate::error::Error;
use crate::function::{Fetch, Guest, OffloadFunction, OverlapOffloadFunction};
use crate::home::{Stamp, unchanged};
use crate::schedule::Direction;

/// A block whose tensors are at home.
#[derive(Debug)]
pub(crate) struct Away {
    held: FunctionalCall<dyn Block>,
    engine: Engine,
    layer: usize,
    number: usize,
}

impl Away {
    pub(crate) fn new(held: FunctionalCall<dyn Block>, engine: Engine, layer: usize, number: usize) -> Self {
        Self { held, engine, layer, number }
    }

    fn guest(&self) -> Guest {
        let Self { held, engine, layer, number } = self;
        Guest { block: held.shared(), engine: engine.clone(), layer: *layer, number: *number }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        let result = self.held.visit_mut(visitor);
        // What the edit put in goes home, also where it failed half way.
        self.engine.replace(self.layer, self.held.named())?;
        result
    }

    /// What every rung does first; whether there will be a backward.
    fn begin(&self, x: &Tensor) -> Result<bool> {
        self.engine.begin_forward()?;
        Ok(self.held.records(x))
    }
}

macro_rules! rungs {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name(pub(crate) Away);

        impl Module for $name {
            fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
                self.0.held.visit(visitor);
            }

            fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
                self.0.visit_mut(visitor)
            }
        }
    )*};
}

rungs! {
    /// Brings a layer, runs it, and lets it go: inference in the device memory of one layer. Its tensors at home are never written, so
    /// sending it back costs nothing. A pass that records gradients is refused.
    OffloadBlock;
    /// [`OffloadBlock`] as a recomputed segment: forward keeps the layer's input, backward brings the layer again and runs it with
    /// a graph. Gradients come home through autograd.
    OffloadBlockWithCheckpointing;
    /// The same by hand: a function whose backward brings the layer, runs it with a graph of its own, and sends gradients home.
    OffloadBlockWithFunction;
    /// The same in a ring of slots: while a layer runs, the next ones come on a stream of their own and the gradients of the last
    /// one go on another. The last layers of forward stay for backward, and the last of backward for the next forward.
    OverlapOffloadBlock;
}

impl Block for OffloadBlock {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        if self.0.begin(x_btd)? {
            let reason = format!(
                "`{}` is offloaded for inference, but gradients are recorded; take Method::Overlap, or turn gradients off",
                self.0.held.name()
            );
            return Err(Error::config("method", reason).into());
        }
        Ok(self.0.guest().visit::<Fetched>(x_btd, context)?)
    }
}

impl Block for OffloadBlockWithCheckpointing {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        if !self.0.begin(x_btd)? {
            return Ok(self.0.guest().visit::<Fetched>(x_btd, context)?);
        }
        let (guest, context) = (self.0.guest(), OwnedContext::from(context));
        let stamp = guest.engine.stamp(guest.layer)?;
        let segment = move |x: &[Tensor]| {
            // The segment runs without recording in forward, and with it in backward.
            let direction = if GradMode::enabled() { Direction::Backward } else { Direction::Forward };
            guest.engine.check_unchanged(guest.layer, &stamp)?;
            let own = guest.engine.with_layers(|layers| {
                layers[guest.layer].tensors.iter().map(Tensor::shallow_clone).collect::<Vec<_>>()
            });
            let inputs: Vec<&Tensor> = own.iter().collect();
            let leaves = apply(Fetch(guest.clone(), direction), &inputs)?;
            Ok(vec![guest.run(&leaves, &x[0], &context.borrow(), direction)?])
        };
        Ok(Checkpoint::default().run(segment, &[x_btd])?.remove(0))
    }
}

impl Block for OffloadBlockWithFunction {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        if !self.0.begin(x_btd)? {
            return Ok(self.0.guest().visit::<Fetched>(x_btd, context)?);
        }
        Ok(OffloadFunction::apply(self.0.guest(), x_btd, context)?)
    }
}

impl Block for OverlapOffloadBlock {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        if !self.0.begin(x_btd)? {
            return Ok(self.0.guest().visit::<Lease>(x_btd, context)?);
        }
        Ok(OverlapOffloadFunction::apply(self.0.guest(), x_btd, context)?)
    }
}

/// A block that stays on the device among others that do not, and is run again in backward as they are.
#[derive(Debug)]
pub struct ResidentBlock {
    held: FunctionalCall<dyn Block>,
    engine: Engine,
    number: usize,
}

impl ResidentBlock {
    pub(crate) fn new(held: FunctionalCall<dyn Block>, engine: Engine, number: usize) -> Self {
        Self { held, engine, number }
    }
}

impl Module for ResidentBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        self.held.visit(visitor);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        self.held.visit_mut(visitor)
    }
}

impl Block for ResidentBlock {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let (part, engine, number) = (self.held.shared(), self.engine.clone(), self.number);
        if !self.held.records(x_btd) {
            let run = || Ok(part.run(|block| block.forward(x_btd, context))?);
            return Ok(engine.computing(number, Direction::Forward, run)?);
        }
        let context = OwnedContext::from(context);
        let (name, named) = (self.held.name().to_owned(), handles(&self.held));
        let stamp = Stamp::of(&named)?;
        let segment = move |x: &[Tensor]| {
            let direction = if GradMode::enabled() { Direction::Backward } else { Direction::Forward };
            unchanged(&stamp, &name, &named)?;
            let run = || Ok(part.run(|block| block.forward(&x[0], &context.borrow()))?);
            Ok(vec![engine.computing(number, direction, run)?])
        };
        Ok(Checkpoint::default().run(segment, &[x_btd])?.remove(0))
    }
}

fn handles(held: &FunctionalCall<dyn Block>) -> Vec<(String, Tensor)> {
    held.named().iter().map(|(name, tensor, _)| (name.clone(), tensor.shallow_clone())).collect()
}
