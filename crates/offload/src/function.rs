//! A layer as one function: y = f(x; w), where w is on the device only while f runs.
//!
//! Forward brings w, computes y without a graph, and lets w go; x alone is kept. Backward brings w again, runs f once more with a
//! graph, and gets from ∂L/∂y both ∂L/∂x, which it returns, and ∂L/∂w, which goes to the host. What the layer costs is one more forward
//! and two loads; what it holds between its forward and its backward is x.
//!
//! It differs from a checkpointed segment with a load inside in that the graph never sees w's way to the device: gradients of w
//! are the engine's to move, on a stream of their own, and not autograd's.

use std::fmt;

use models::module::{Block, Context, OwnedContext, SharedModule};
use runtime::autograd::{
    Backward, Forward, Function, GradMode, Keep, Settings, ThreadLocalState, apply_always, backward_with,
};
use runtime::profile;
use tch::Tensor;

use crate::engine::{Engine, Fetched, Lease, Outstanding};
use crate::error::{Error, Result};
use crate::home::Stamp;
use crate::schedule::Direction;

/// A layer on the device, for as long as the value lives.
pub(crate) trait OnDevice: Sized {
    fn begin(engine: &Engine, layer: usize, direction: Direction) -> Result<Self>;
    fn leaves(&self) -> &[Tensor];
}

impl OnDevice for Fetched {
    fn begin(engine: &Engine, layer: usize, direction: Direction) -> Result<Self> {
        engine.fetch(layer, direction)
    }

    fn leaves(&self) -> &[Tensor] {
        &self.leaves
    }
}

impl OnDevice for Lease {
    fn begin(engine: &Engine, layer: usize, direction: Direction) -> Result<Self> {
        engine.acquire(layer, direction)
    }

    fn leaves(&self) -> &[Tensor] {
        &self.leaves
    }
}

/// A layer whose block may run on other tensors than its own.
#[derive(Clone)]
pub(crate) struct Guest {
    pub(crate) block: SharedModule<dyn Block>,
    pub(crate) engine: Engine,
    /// Among the engine's layers.
    pub(crate) layer: usize,
    /// Among the model's blocks.
    pub(crate) number: usize,
}

impl Guest {
    /// Runs the block on `leaves`.
    pub(crate) fn run(
        &self,
        leaves: &[Tensor],
        x: &Tensor,
        context: &Context<'_>,
        direction: Direction,
    ) -> Result<Tensor> {
        self.engine.computing(self.number, direction, || {
            Ok(self.block.functional_call(leaves, |block| block.forward(x, context))?)
        })
    }

    /// Brings the layer, runs it without a graph, and lets it go.
    pub(crate) fn visit<D: OnDevice>(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let on_device = D::begin(&self.engine, self.layer, Direction::Forward)?;
        self.run(on_device.leaves(), x, context, Direction::Forward)
    }
}

impl fmt::Debug for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guest").field("layer", &self.layer).finish_non_exhaustive()
    }
}

/// Part 4 of the assignment: brings the layer when it runs, in forward and in backward, and lets it go at once.
pub(crate) struct OffloadFunction {
    guest: Guest,
    context: OwnedContext,
    kept: Option<Kept>,
}

/// What a forward keeps for its backward besides its input.
struct Kept {
    state: ThreadLocalState,
    /// What the block's forward went by; none until it has run.
    settings: Option<Settings>,
    /// The layer's values.
    stamp: Stamp,
    outstanding: Outstanding,
}

/// Part 5 of the assignment: the layer is in a slot of the ring by the time that it runs, and the next ones are on their way.
pub(crate) struct OverlapOffloadFunction(OffloadFunction);

impl OffloadFunction {
    fn new(guest: Guest, context: &Context<'_>) -> Self {
        Self { guest, context: OwnedContext::from(context), kept: None }
    }

    pub(crate) fn apply(guest: Guest, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        Ok(apply_always(Self::new(guest, context), &[x])?.remove(0))
    }

    fn forward_as<D: OnDevice>(&mut self, ctx: &mut Forward<'_>, x: &Tensor) -> Result<Vec<Tensor>> {
        ctx.save(x);
        if ctx.will_run_backward() {
            let Guest { engine, layer, .. } = &self.guest;
            self.kept = Some(Kept {
                state: ThreadLocalState::capture(true)?,
                settings: None,
                stamp: engine.stamp(*layer)?,
                outstanding: engine.outstanding(*layer),
            });
        }
        let (y, settings) = Settings::of(|| self.guest.visit::<D>(x, &self.context.borrow()));
        if let Some(kept) = &mut self.kept {
            kept.settings = Some(settings);
        }
        Ok(vec![y?])
    }

    fn backward_as<D: OnDevice>(
        &self,
        ctx: &mut Backward,
        gradient: Option<Tensor>,
    ) -> Result<Vec<Option<Tensor>>> {
        ctx.check_replay("offload")?;
        let Guest { engine, layer, number, .. } = &self.guest;
        let Some(Kept { state, settings, stamp, outstanding }) = &self.kept else {
            return Err(Error::config("function", "its forward recorded nothing"));
        };
        if ctx.may_overwrite_saved() {
            outstanding.end();
        }
        let Some(gradient) = gradient else { return Ok(vec![None]) };
        engine.await_end(ctx)?;
        engine.check_unchanged(*layer, stamp)?;
        let x = ctx.take_saved().pop().ok_or_else(|| Error::config("function", "its input was not saved"))?;
        let x = x.f_detach()?.f_set_requires_grad(ctx.needs_input_grad(0))?;
        let on_device = D::begin(engine, *layer, Direction::Backward)?;
        engine.computing(*number, Direction::Backward, || {
            let y = {
                let _recompute = profile::recompute();
                let _state = state.enter()?;
                let _grad = GradMode::on();
                let block = &self.guest.block;
                let (y, second) = Settings::of(|| {
                    block.functional_call(on_device.leaves(), |block| {
                        block.forward(&x, &self.context.borrow())
                    })
                });
                if let Some(first) = settings {
                    first.check(second, "offload")?;
                }
                y?
            };
            if y.requires_grad() {
                let _grad = GradMode::on();
                backward_with(&[&y], &[Some(&gradient)], Keep::default())?;
            }
            Ok(())
        })?;
        engine.deliver(*layer, on_device.leaves())?;
        Ok(vec![Some(x.f_grad()?).filter(Tensor::defined)])
    }
}

impl OverlapOffloadFunction {
    pub(crate) fn apply(guest: Guest, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        Ok(apply_always(Self(OffloadFunction::new(guest, context)), &[x])?.remove(0))
    }
}

impl Function for OffloadFunction {
    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        Ok(self.forward_as::<Fetched>(ctx, inputs[0])?)
    }

    fn backward(
        &self,
        ctx: &mut Backward,
        mut grads: Vec<Option<Tensor>>,
    ) -> runtime::Result<Vec<Option<Tensor>>> {
        Ok(self.backward_as::<Fetched>(ctx, grads.remove(0))?)
    }
}

impl Function for OverlapOffloadFunction {
    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        Ok(self.0.forward_as::<Lease>(ctx, inputs[0])?)
    }

    fn backward(
        &self,
        ctx: &mut Backward,
        mut grads: Vec<Option<Tensor>>,
    ) -> runtime::Result<Vec<Option<Tensor>>> {
        Ok(self.0.backward_as::<Lease>(ctx, grads.remove(0))?)
    }
}

/// The way of a layer's tensors to the device as a function of their own, for a recomputed segment around it: gradients go back as
/// autograd's, into the host's memory.
pub(crate) struct Fetch(pub(crate) Guest, pub(crate) Direction);

impl Function for Fetch {
    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        let Self(Guest { engine, layer, .. }, direction) = self;
        let fetched = engine.fetch(*layer, *direction)?;
        for index in 0..inputs.len() {
            if !ctx.needs_input_grad(index) {
                ctx.mark_non_differentiable(index);
            }
        }
        fetched.leaves.iter().map(|leaf| Ok(leaf.f_detach()?)).collect()
    }

    fn backward(
        &self,
        ctx: &mut Backward,
        grads: Vec<Option<Tensor>>,
    ) -> runtime::Result<Vec<Option<Tensor>>> {
        let Self(Guest { engine, layer, .. }, _) = self;
        let needed = |index: &usize| ctx.needs_input_grad(*index);
        let found: Vec<(usize, Tensor)> = grads
            .into_iter()
            .enumerate()
            .filter_map(|(index, gradient)| Some((index, gradient?)))
            .filter(|(index, _)| needed(index))
            .collect();
        let count = engine.with_layers(|layers| layers[*layer].tensors.len());
        let mut gradients: Vec<Option<Tensor>> = (0..count).map(|_| None).collect();
        for (index, gradient) in found {
            gradients[index] = Some(engine.to_host(*layer, &gradient)?);
        }
        Ok(gradients)
    }
}
