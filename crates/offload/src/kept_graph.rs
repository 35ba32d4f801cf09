//! A layer as one autograd function that keeps its activations.
//!
//! Forward loads w, runs f with a graph, and frees w. The graph stays: of the layer's weights it has references to storages that own no
//! memory ([`MovableMemory`]). Backward loads w again, wherever its slot is then, attaches that memory, and runs the graph. So the
//! layer is loaded as often as one that is recomputed, and runs once.

use std::cell::RefCell;

use models::module::{Context, OwnedContext};
use runtime::autograd::{Backward, Forward, Function, GradMode, Keep, apply_always, backward_with, set_grad};
use runtime::memory::MovableMemory;
use tch::Tensor;
use training::layer_source::set_placeholder;

use crate::engine::{Lease, Outstanding};
use crate::error::{Result, refused};
use crate::function::{LayerRunner, OnDevice};
use crate::schedule::Direction;
use crate::storage::TensorVersions;

/// [`OverlapOffloadFunction`](crate::function::OverlapOffloadFunction) without recomputation.
pub(crate) struct KeepingOffloadFunction {
    runner: LayerRunner,
    context: OwnedContext,
    recorded: Option<Recorded>,
}

/// State that a forward saves for its backward.
struct Recorded {
    /// The layer's values at the forward.
    versions_at_forward: TensorVersions,
    outstanding: Outstanding,
    /// Taken by the last backward.
    graph: RefCell<Option<Graph>>,
}

/// The layer's own graph.
struct Graph {
    memory: MovableMemory,
    /// Views of `memory`: the graph's leaves.
    leaves: Vec<Tensor>,
    /// The leaf of the layer's input, whose gradient is asked for. It has its shape, without its memory, which the graph keeps if it
    /// needs it.
    x: Tensor,
    /// Its history, without its memory.
    y: Tensor,
}

impl KeepingOffloadFunction {
    pub(crate) fn apply(runner: LayerRunner, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let function = Self { runner, context: OwnedContext::from(context), recorded: None };
        let [y] = apply_always(function, &[x])?;
        Ok(y)
    }

    fn run(&mut self, ctx: &Forward<'_>, x: &Tensor) -> Result<Tensor> {
        let (runner, context) = (&self.runner, self.context.borrow());
        if !ctx.will_run_backward() {
            return runner.forward::<Lease>(x, &context);
        }
        let LayerRunner { engine, layer, .. } = runner;
        let versions_at_forward = engine.versions_at_forward(*layer)?;
        let outstanding = engine.outstanding(*layer);
        let lease = Lease::begin(engine, *layer, Direction::Forward)?;
        let (memory, leaves) = engine.movable_leaves(*layer)?;
        // Shares the memory and the version of the layer's input, not its history.
        let x = x.f_detach()?.f_set_requires_grad(ctx.needs_input_grad(0))?;
        let mut y = {
            let _attached = lease.attach(&memory)?;
            let _grad = GradMode::on();
            // Another tensor than the leaf: what saves it has the memory that the leaf loses.
            let x = x.f_view_as(&x)?;
            runner.run(&leaves, &x, &context, Direction::Forward)?
        };
        set_placeholder(&x)?;
        let output = y.f_detach()?;
        // A block may return its input.
        if !y.f_is_leaf()? {
            y.f_set_data(&Tensor::f_empty([0], (y.kind(), y.device()))?)?;
        }
        let graph = RefCell::new(Some(Graph { memory, leaves, x, y }));
        self.recorded = Some(Recorded { versions_at_forward, outstanding, graph });
        Ok(output)
    }

    fn run_backward(&self, ctx: &Backward, gradient: Option<Tensor>) -> Result<Option<Tensor>> {
        ctx.check_replay("offload")?;
        let LayerRunner { engine, layer, .. } = &self.runner;
        let Some(Recorded { versions_at_forward, outstanding, graph }) = &self.recorded else {
            return Err(refused("function", "its forward recorded nothing"));
        };
        let is_last = ctx.may_overwrite_saved();
        if is_last {
            outstanding.end();
        }
        let Some(gradient) = gradient else { return Ok(None) };
        engine.at_backward_end(ctx)?;
        engine.check_unchanged(*layer, versions_at_forward)?;
        let mut graph = graph.borrow_mut();
        let Some(recorded) = graph.as_ref() else {
            return Err(refused("function", "its graph was freed"));
        };
        let input_gradient = self.differentiate(recorded, &gradient, !is_last);
        if is_last {
            *graph = None;
        } else {
            // A backward that failed leaves gradients behind, which the next one would add to.
            recorded.leaves.iter().chain([&recorded.x]).try_for_each(|leaf| set_grad(leaf, None))?;
        }
        input_gradient
    }

    /// Loads the layer and runs the graph's backward.
    fn differentiate(&self, own: &Graph, gradient: &Tensor, keeps_graph: bool) -> Result<Option<Tensor>> {
        let LayerRunner { engine, layer, number, .. } = &self.runner;
        let lease = Lease::begin(engine, *layer, Direction::Backward)?;
        engine.computing(*number, Direction::Backward, || {
            if own.y.requires_grad() {
                let _attached = lease.attach(&own.memory)?;
                let _grad = GradMode::on();
                let keep = Keep { graph: keeps_graph, ..Keep::default() };
                backward_with(&[&own.y], &[Some(gradient)], keep)?;
            }
            Ok(())
        })?;
        engine.deliver(*layer, &own.leaves)?;
        Ok(Some(own.x.f_grad()?).filter(Tensor::defined))
    }
}

impl Function for KeepingOffloadFunction {
    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        Ok(vec![self.run(ctx, inputs[0])?])
    }

    fn backward(
        &self,
        ctx: &mut Backward,
        mut grads: Vec<Option<Tensor>>,
    ) -> runtime::Result<Vec<Option<Tensor>>> {
        Ok(vec![self.run_backward(ctx, grads.remove(0))?])
    }
}
