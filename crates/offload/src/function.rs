//! A layer as one autograd function: y = f(x; w), with w on the device only while f runs. x and y are the layer's values: the residual
//! stream, and what it shares with other layers.
//!
//! Forward loads w, computes y without a graph, and frees w; only x is saved. Backward loads w again, recomputes f with a
//! graph, and computes from ∂L/∂y both ∂L/∂x, which it returns, and ∂L/∂w, which is copied to the host. The cost is one more
//! forward and two loads; between forward and backward it keeps x, on the device or in host memory
//! ([`OffloadConfig::inputs_on_host`](crate::OffloadConfig::inputs_on_host)).
//!
//! Unlike a checkpointed segment with a load inside, the graph does not contain the load of w: the engine, not autograd, moves
//! the gradients of w, on their own stream.

use std::fmt;

use models::module::{Block, Context, OwnedContext, SharedModule};
use runtime::autograd::{
    Backward, Forward, Function, GradMode, Keep, SavedTensorStorage, Settings, StoredTensor,
    ThreadLocalState, apply_always_any, backward_with,
};
use runtime::{precision, profile};
use tch::Tensor;
use training::activations::LayerStorage;

use crate::engine::{Engine, Fetched, Lease, Outstanding, SegmentBackward};
use crate::error::{Result, refused};
use crate::schedule::Direction;
use crate::storage::TensorVersions;

/// A layer on the device, until the value is dropped.
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

/// Runs a layer's block with the tensors on the device.
#[derive(Clone)]
pub(crate) struct LayerRunner {
    pub(crate) block: SharedModule<dyn Block>,
    pub(crate) engine: Engine,
    /// Index among the engine's layers.
    pub(crate) layer: usize,
    /// Index among the model's blocks.
    pub(crate) number: usize,
}

impl LayerRunner {
    /// Runs the block with `leaves`.
    pub(crate) fn run(
        &self,
        leaves: &[Tensor],
        values: &[&Tensor],
        context: &Context<'_>,
        direction: Direction,
    ) -> Result<Vec<Tensor>> {
        self.engine.computing(self.number, direction, || {
            // The leaves are made for one use.
            let _uncached = precision::uncached();
            self.block.functional_call(leaves, |block| block.forward_with(values, context))
        })
    }

    /// Loads the layer, runs it without a graph, and frees it.
    pub(crate) fn forward<D: OnDevice>(
        &self,
        values: &[&Tensor],
        context: &Context<'_>,
    ) -> Result<Vec<Tensor>> {
        let on_device = D::begin(&self.engine, self.layer, Direction::Forward)?;
        self.run(on_device.leaves(), values, context, Direction::Forward)
    }
}

impl fmt::Debug for LayerRunner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerRunner").field("layer", &self.layer).finish_non_exhaustive()
    }
}

/// Part 4 of the assignment: loads the layer for each forward and backward, and frees it immediately.
pub(crate) struct OffloadFunction {
    runner: LayerRunner,
    context: OwnedContext,
    kept: Option<Kept>,
}

/// State that a forward saves for its backward.
struct Kept {
    /// The number of inputs.
    count: usize,
    /// The inputs in host memory; `None` where they are among the saved tensors.
    inputs: Option<Vec<Box<dyn StoredTensor>>>,
    state: ThreadLocalState,
    /// The settings of the block's forward; `None` until it has run.
    settings: Option<Settings>,
    /// The layer's values at the forward.
    versions_at_forward: TensorVersions,
    outstanding: Outstanding,
}

/// Part 5 of the assignment: the layer is prefetched into a slot of the ring, and the next ones are being loaded.
pub(crate) struct OverlapOffloadFunction(OffloadFunction);

impl OffloadFunction {
    fn new(runner: LayerRunner, context: &Context<'_>) -> Self {
        Self { runner, context: OwnedContext::from(context), kept: None }
    }

    pub(crate) fn apply(
        runner: LayerRunner,
        values: &[&Tensor],
        context: &Context<'_>,
    ) -> Result<Vec<Tensor>> {
        apply_always_any(Self::new(runner, context), values)
    }

    fn forward_as<D: OnDevice>(&mut self, ctx: &mut Forward<'_>, values: &[&Tensor]) -> Result<Vec<Tensor>> {
        if ctx.will_run_backward() {
            let LayerRunner { engine, layer, number, .. } = &self.runner;
            let storage = engine.input_storage(*number);
            let pack = |storage: LayerStorage| {
                values.iter().map(|value| storage.pack(value)).collect::<runtime::Result<Vec<_>>>()
            };
            let inputs = storage.map(pack).transpose()?;
            if inputs.is_none() {
                values.iter().for_each(|value| ctx.save(value));
            }
            self.kept = Some(Kept {
                count: values.len(),
                inputs,
                state: ThreadLocalState::capture(true)?,
                settings: None,
                versions_at_forward: engine.versions_at_forward(*layer)?,
                outstanding: engine.outstanding(*layer),
            });
        }
        let (results, settings) = Settings::of(|| self.runner.forward::<D>(values, &self.context.borrow()));
        let results = results?;
        if let Some(kept) = &mut self.kept {
            kept.settings = Some(settings);
            kept.inputs.iter().flatten().try_for_each(|input| input.wait())?;
        }
        Ok(results)
    }

    fn backward_as<D: OnDevice>(
        &self,
        ctx: &mut Backward,
        gradients: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        ctx.check_replay("offload")?;
        let LayerRunner { engine, layer, number, .. } = &self.runner;
        let Some(Kept { count, inputs, state, settings, versions_at_forward, outstanding }) = &self.kept
        else {
            return Err(refused("function", "its forward recorded nothing"));
        };
        if ctx.may_overwrite_saved() {
            outstanding.end();
        }
        if gradients.iter().all(Option::is_none) {
            return Ok((0..*count).map(|_| None).collect());
        }
        engine.at_backward_end(ctx)?;
        engine.check_unchanged(*layer, versions_at_forward)?;
        let saved = match inputs {
            // In reverse, since each starts the copy of the one that was stored before it.
            Some(inputs) => {
                let reversed: Result<Vec<Tensor>> = inputs.iter().rev().map(|input| input.unpack()).collect();
                reversed?.into_iter().rev().collect()
            }
            None => ctx.take_saved(),
        };
        if saved.len() != *count {
            return Err(refused("function", "its inputs were not saved"));
        }
        let leaf = |(index, value): (usize, Tensor)| -> Result<Tensor> {
            Ok(value.f_detach()?.f_set_requires_grad(ctx.needs_input_grad(index))?)
        };
        let values: Vec<Tensor> = saved.into_iter().enumerate().map(leaf).collect::<Result<_>>()?;
        let borrowed: Vec<&Tensor> = values.iter().collect();
        let on_device = D::begin(engine, *layer, Direction::Backward)?;
        engine.computing(*number, Direction::Backward, || {
            let results = {
                let _recompute = profile::recompute();
                let _state = state.enter()?;
                let _grad = GradMode::on();
                // After the state of the forward, whose policy it is.
                let _uncached = precision::uncached();
                let block = &self.runner.block;
                let (results, second) = Settings::of(|| {
                    block.functional_call(on_device.leaves(), |block| {
                        block.forward_with(&borrowed, &self.context.borrow())
                    })
                });
                // A run that had no memory for its rest has noted less.
                let ended = !results.as_ref().is_err_and(|error| error.is_out_of_memory());
                if let Some(first) = settings.filter(|_| ended) {
                    first.check(second, "offload")?;
                }
                results?
            };
            differentiate(&results, gradients, Keep::default())
        })?;
        engine.deliver(*layer, on_device.leaves())?;
        values.iter().map(|value| Ok(Some(value.f_grad()?).filter(Tensor::defined))).collect()
    }
}

/// Runs the backward of a layer's results that have a gradient.
pub(crate) fn differentiate(results: &[Tensor], gradients: &[Option<Tensor>], keep: Keep) -> Result<()> {
    let (reached, upstream): (Vec<&Tensor>, Vec<Option<&Tensor>>) = results
        .iter()
        .zip(gradients)
        .filter(|(result, gradient)| gradient.is_some() && result.requires_grad())
        .map(|(result, gradient)| (result, gradient.as_ref()))
        .unzip();
    if reached.is_empty() {
        return Ok(());
    }
    let _grad = GradMode::on();
    backward_with(&reached, &upstream, keep)
}

impl OverlapOffloadFunction {
    pub(crate) fn apply(
        runner: LayerRunner,
        values: &[&Tensor],
        context: &Context<'_>,
    ) -> Result<Vec<Tensor>> {
        apply_always_any(Self(OffloadFunction::new(runner, context)), values)
    }
}

impl Function for OffloadFunction {
    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        self.forward_as::<Fetched>(ctx, inputs)
    }

    fn backward(
        &self,
        ctx: &mut Backward,
        grads: Vec<Option<Tensor>>,
    ) -> runtime::Result<Vec<Option<Tensor>>> {
        self.backward_as::<Fetched>(ctx, &grads)
    }
}

impl Function for OverlapOffloadFunction {
    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        self.0.forward_as::<Lease>(ctx, inputs)
    }

    fn backward(
        &self,
        ctx: &mut Backward,
        grads: Vec<Option<Tensor>>,
    ) -> runtime::Result<Vec<Option<Tensor>>> {
        self.0.backward_as::<Lease>(ctx, &grads)
    }
}

/// The load of a layer's tensors as an autograd function, for activation checkpointing: autograd returns the gradients to host
/// memory.
pub(crate) struct Fetch {
    pub(crate) runner: LayerRunner,
    pub(crate) direction: Direction,
    /// The span of the backward that ends with these gradients.
    pub(crate) compute: Option<SegmentBackward>,
}

impl Function for Fetch {
    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        let Self { runner: LayerRunner { engine, layer, .. }, direction, .. } = self;
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
        let Self { runner: LayerRunner { engine, layer, .. }, compute, .. } = self;
        compute.as_ref().map_or(Ok(()), SegmentBackward::end)?;
        let needed = |index: &usize| ctx.needs_input_grad(*index);
        let arrived: Vec<(usize, Tensor)> = grads
            .into_iter()
            .enumerate()
            .filter_map(|(index, gradient)| Some((index, gradient?)))
            .filter(|(index, _)| needed(index))
            .collect();
        let count = engine.with_layers(|layers| layers[*layer].tensors.len());
        let mut gradients: Vec<Option<Tensor>> = (0..count).map(|_| None).collect();
        for (index, gradient) in arrived {
            gradients[index] = Some(engine.to_host(*layer, &gradient)?);
        }
        Ok(gradients)
    }
}
