//! A layer as one autograd function that keeps its activations.
//!
//! Forward loads w, runs f with a graph, and frees w. The graph stays: of the layer's weights it has references to storages that own no
//! memory ([`MovableMemory`]). Backward loads w again, wherever its slot is then, attaches that memory, and runs the graph. So the
//! layer is loaded as often as one that is recomputed, and runs once.

use std::cell::RefCell;

use models::module::{Context, OwnedContext};
use runtime::autograd::{Backward, Forward, Function, GradMode, Keep, apply_always_any, set_grad};
use runtime::memory::MovableMemory;
use tch::Tensor;
use training::layer_source::set_placeholder;

use crate::engine::{Lease, Outstanding};
use crate::error::{Result, refused};
use crate::function::{LayerRunner, OnDevice, differentiate};
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
    /// The number of the layer's values.
    inputs: usize,
    /// Taken by the last backward.
    graph: RefCell<Option<Graph>>,
}

/// The layer's own graph.
struct Graph {
    memory: MovableMemory,
    /// Views of `memory`: the graph's leaves.
    leaves: Vec<Tensor>,
    /// The leaves of the layer's values, whose gradients are asked for. They have their shapes, without their memory, which the graph keeps
    /// if it needs it.
    values: Vec<Tensor>,
    /// The layer's results with their history, the first without its memory.
    results: Vec<Tensor>,
}

impl KeepingOffloadFunction {
    pub(crate) fn apply(
        runner: LayerRunner,
        values: &[&Tensor],
        context: &Context<'_>,
    ) -> Result<Vec<Tensor>> {
        let function = Self { runner, context: OwnedContext::from(context), recorded: None };
        apply_always_any(function, values)
    }

    fn run(&mut self, ctx: &Forward<'_>, values: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (runner, context) = (&self.runner, self.context.borrow());
        if !ctx.will_run_backward() {
            return runner.forward::<Lease>(values, &context);
        }
        let LayerRunner { engine, layer, .. } = runner;
        let versions_at_forward = engine.versions_at_forward(*layer)?;
        let outstanding = engine.outstanding(*layer);
        let lease = Lease::begin(engine, *layer, Direction::Forward)?;
        let (memory, leaves) = engine.movable_leaves(*layer)?;
        // They share the memory and the version of the layer's values, not their history.
        let leaf = |(index, value): (usize, &&Tensor)| -> Result<Tensor> {
            Ok(value.f_detach()?.f_set_requires_grad(ctx.needs_input_grad(index))?)
        };
        let values: Vec<Tensor> = values.iter().enumerate().map(leaf).collect::<Result<_>>()?;
        let mut results = {
            let _attached = lease.attach(&memory)?;
            let _grad = GradMode::on();
            // Other tensors than the leaves: what saves them has the memory that the leaves lose.
            let views: Vec<Tensor> =
                values.iter().map(|value| Ok(value.f_view_as(value)?)).collect::<Result<_>>()?;
            runner.run(&leaves, &views.iter().collect::<Vec<_>>(), &context, Direction::Forward)?
        };
        values.iter().try_for_each(set_placeholder)?;
        let outputs: Vec<Tensor> =
            results.iter().map(|result| Ok(result.f_detach()?)).collect::<Result<_>>()?;
        // Of the residual stream alone, which nothing in the graph has saved: attention has saved keys that later layers share. A block
        // may return its input.
        if let Some(y) = results.first_mut().filter(|y| y.f_is_leaf().is_ok_and(|is_leaf| !is_leaf)) {
            y.f_set_data(&Tensor::f_empty([0], (y.kind(), y.device()))?)?;
        }
        let inputs = values.len();
        let graph = RefCell::new(Some(Graph { memory, leaves, values, results }));
        self.recorded = Some(Recorded { versions_at_forward, outstanding, inputs, graph });
        Ok(outputs)
    }

    fn run_backward(&self, ctx: &Backward, gradients: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> {
        ctx.check_replay("offload")?;
        let LayerRunner { engine, layer, .. } = &self.runner;
        let Some(Recorded { versions_at_forward, outstanding, inputs, graph }) = &self.recorded else {
            return Err(refused("function", "its forward recorded nothing"));
        };
        let is_last = ctx.may_overwrite_saved();
        if is_last {
            outstanding.end();
        }
        if gradients.iter().all(Option::is_none) {
            return Ok((0..*inputs).map(|_| None).collect());
        }
        engine.at_backward_end(ctx)?;
        engine.check_unchanged(*layer, versions_at_forward)?;
        let mut graph = graph.borrow_mut();
        let Some(recorded) = graph.as_ref() else {
            return Err(refused("function", "its graph was freed"));
        };
        let input_gradients = self.differentiate(recorded, gradients, !is_last);
        if is_last {
            *graph = None;
        } else {
            // A backward that failed leaves gradients behind, which the next one would add to.
            recorded.leaves.iter().chain(&recorded.values).try_for_each(|leaf| set_grad(leaf, None))?;
        }
        input_gradients
    }

    /// Loads the layer and runs the graph's backward.
    fn differentiate(
        &self,
        own: &Graph,
        gradients: &[Option<Tensor>],
        keeps_graph: bool,
    ) -> Result<Vec<Option<Tensor>>> {
        let LayerRunner { engine, layer, number, .. } = &self.runner;
        let lease = Lease::begin(engine, *layer, Direction::Backward)?;
        engine.computing(*number, Direction::Backward, || {
            let _attached = lease.attach(&own.memory)?;
            differentiate(&own.results, gradients, Keep { graph: keeps_graph, ..Keep::default() })
        })?;
        engine.deliver(*layer, &own.leaves)?;
        own.values.iter().map(|value| Ok(Some(value.f_grad()?).filter(Tensor::defined))).collect()
    }
}

impl Function for KeepingOffloadFunction {
    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        self.run(ctx, inputs)
    }

    fn backward(
        &self,
        ctx: &mut Backward,
        grads: Vec<Option<Tensor>>,
    ) -> runtime::Result<Vec<Option<Tensor>>> {
        self.run_backward(ctx, &grads)
    }
}
