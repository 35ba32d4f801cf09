//! Wrappers that offload a block of any model, one for each [`Method`](crate::Method).
//!
//! | type | loaded | backward | on the device |
//! |---|---|---|---|
//! | [`OffloadBlock`] | for each use | – | one layer |
//! | [`OffloadBlockWithCheckpointing`] | for each use | a recomputed segment ([`runtime::autograd::checkpoint`]) | one layer, and x of each |
//! | [`OffloadBlockWithFunction`] | for each use | a custom autograd function | one layer, and x of each |
//! | [`OverlapOffloadBlock`] | prefetched into a ring of slots | a custom autograd function | the ring, and x or the activations of each |
//!
//! With [`OffloadConfig::inputs_on_host`](crate::OffloadConfig::inputs_on_host), x of each is in host memory.
//!
//! The names of tensors, and the tensors themselves, do not change, so an optimizer, a checkpoint and an adapter see the model
//! as before. [`Offload`](crate::Offload) installs these wrappers.

use std::sync::Arc;

use models::Result;
use models::module::{Block, Context, FunctionalCall, Module, OwnedContext, Visitor, VisitorMut, one};
use runtime::autograd::{Checkpoint, GradMode, apply_any};
use tch::Tensor;

use crate::engine::{Engine, Fetched, Lease, SegmentBackward};
use crate::error::refused;
use crate::function::{Fetch, LayerRunner, OffloadFunction, OverlapOffloadFunction};
use crate::kept_graph::KeepingOffloadFunction;
use crate::schedule::Direction;
use crate::storage::{TensorVersions, unchanged};

/// A block whose tensors are in host memory or files.
#[derive(Debug)]
pub(crate) struct OffloadedLayer {
    block: FunctionalCall<dyn Block>,
    engine: Engine,
    layer: usize,
    number: usize,
}

impl OffloadedLayer {
    pub(crate) fn new(block: FunctionalCall<dyn Block>, engine: Engine, layer: usize, number: usize) -> Self {
        Self { block, engine, layer, number }
    }

    fn runner(&self) -> LayerRunner {
        let Self { block, engine, layer, number } = self;
        LayerRunner { block: block.shared(), engine: engine.clone(), layer: *layer, number: *number }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        let result = self.block.visit_mut(visitor);
        // Offloads new tensors, also if the mapper failed half way.
        self.engine.replace(self.layer, self.block.named())?;
        result
    }

    /// Starts a forward; returns whether it records a graph.
    fn begin(&self, values: &[&Tensor]) -> Result<bool> {
        self.engine.begin_forward()?;
        Ok(self.block.records(values))
    }
}

macro_rules! methods {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name(pub(crate) OffloadedLayer);

        impl Module for $name {
            fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
                self.0.block.visit(visitor);
            }

            fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
                self.0.visit_mut(visitor)
            }
        }
    )*};
}

methods! {
    /// Loads a layer, runs it, and frees it: inference in the device memory of one layer. Its tensors are never written, so
    /// nothing is copied back. A forward that records gradients is refused.
    OffloadBlock;
    /// [`OffloadBlock`] with activation checkpointing: forward keeps the layer's input; backward loads the layer again and runs
    /// it with a graph. Gradients return to the host through autograd.
    OffloadBlockWithCheckpointing;
    /// The same with a custom autograd function, whose backward loads the layer, runs it with its own graph, and stores the
    /// gradients on the host.
    OffloadBlockWithFunction;
    /// The same with a ring of slots: while a layer runs, the next ones are loaded on their own stream, and the gradients of
    /// the last one are stored on another. The last layers of forward stay loaded for backward, and the last of backward for
    /// the next forward. A layer of [`OffloadConfig::keep`](crate::OffloadConfig::keep) keeps its activations, without its weights, and does not
    /// run again.
    OverlapOffloadBlock;
}

impl Block for OffloadBlock {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        one(self.forward_with(&[x_btd], context)?)
    }

    fn forward_with(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>> {
        if self.0.begin(values)? {
            let reason = format!(
                "`{}` is offloaded for inference, but gradients are recorded; use Method::Overlap, or disable gradients",
                self.0.block.name()
            );
            return Err(refused("method", reason));
        }
        self.0.runner().forward::<Fetched>(values, context)
    }
}

impl Block for OffloadBlockWithCheckpointing {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        one(self.forward_with(&[x_btd], context)?)
    }

    fn forward_with(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>> {
        if !self.0.begin(values)? {
            return self.0.runner().forward::<Fetched>(values, context);
        }
        let (runner, context) = (self.0.runner(), OwnedContext::from(context));
        let versions_at_forward = runner.engine.versions_at_forward(runner.layer)?;
        let segment = move |values: &[&Tensor]| {
            // The segment runs without recording in forward, and with it in backward.
            let direction = if GradMode::enabled() { Direction::Backward } else { Direction::Forward };
            runner.engine.check_unchanged(runner.layer, &versions_at_forward)?;
            let handles = runner.engine.with_layers(|layers| {
                layers[runner.layer].tensors.iter().map(Tensor::shallow_clone).collect::<Vec<_>>()
            });
            let inputs: Vec<&Tensor> = handles.iter().collect();
            let span = match direction {
                Direction::Backward => runner.engine.segment_backward(runner.number),
                Direction::Forward => None,
            };
            let fetch = Fetch { runner: runner.clone(), direction, compute: span.clone() };
            let leaves = apply_any(fetch, &inputs)?;
            // After the load, so that autograd ends the span before it stores the gradients.
            within_span(span.as_ref(), values, |values| {
                runner.run(&leaves, values, &context.borrow(), direction)
            })
        };
        recomputed(segment, values, &self.0.engine, self.0.number)
    }
}

/// Runs a recomputed segment, whose inputs are in host memory between its passes if those of offloaded layers are.
fn recomputed<F>(segment: F, values: &[&Tensor], engine: &Engine, number: usize) -> Result<Vec<Tensor>>
where
    F: Fn(&[&Tensor]) -> Result<Vec<Tensor>> + Send + 'static,
{
    let storage = engine.input_storage(number).map(|storage| Arc::new(storage) as _);
    Checkpoint::default().run_any_with_storage(segment, values, storage)
}

/// Runs `body` on `values`. If there is a span, its ends are marked on the first of the values and of the results, the residual stream.
fn within_span(
    span: Option<&SegmentBackward>,
    values: &[&Tensor],
    body: impl FnOnce(&[&Tensor]) -> Result<Vec<Tensor>>,
) -> Result<Vec<Tensor>> {
    let (Some(span), Some((x, others))) = (span, values.split_first()) else { return body(values) };
    let x = span.ends_at(x)?;
    let values: Vec<&Tensor> = std::iter::once(&x).chain(others.iter().copied()).collect();
    let mut results = body(&values)?;
    if let Some(y) = results.first_mut() {
        *y = span.begins_at(y)?;
    }
    Ok(results)
}

impl Block for OffloadBlockWithFunction {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        one(self.forward_with(&[x_btd], context)?)
    }

    fn forward_with(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>> {
        if !self.0.begin(values)? {
            return self.0.runner().forward::<Fetched>(values, context);
        }
        OffloadFunction::apply(self.0.runner(), values, context)
    }
}

impl Block for OverlapOffloadBlock {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        one(self.forward_with(&[x_btd], context)?)
    }

    fn forward_with(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>> {
        if !self.0.begin(values)? {
            return self.0.runner().forward::<Lease>(values, context);
        }
        if self.0.engine.options().keep.contains(&self.0.number) {
            return KeepingOffloadFunction::apply(self.0.runner(), values, context);
        }
        OverlapOffloadFunction::apply(self.0.runner(), values, context)
    }
}

/// A block that stays on the device among offloaded blocks, and is recomputed in backward as they are, unless it keeps its activations.
#[derive(Debug)]
pub struct ResidentBlock {
    block: FunctionalCall<dyn Block>,
    engine: Engine,
    number: usize,
}

impl ResidentBlock {
    pub(crate) fn new(block: FunctionalCall<dyn Block>, engine: Engine, number: usize) -> Self {
        Self { block, engine, number }
    }
}

impl Module for ResidentBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        self.block.visit(visitor);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        self.block.visit_mut(visitor)
    }
}

impl Block for ResidentBlock {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        one(self.forward_with(&[x_btd], context)?)
    }

    fn forward_with(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>> {
        let (part, engine, number) = (self.block.shared(), self.engine.clone(), self.number);
        if !self.block.records(values) || engine.options().keep.contains(&number) {
            let run = || part.run(|block| block.forward_with(values, context));
            return engine.computing(number, Direction::Forward, run);
        }
        let context = OwnedContext::from(context);
        let (name, named) = (self.block.name().to_owned(), handles(&self.block));
        let versions_at_forward = TensorVersions::of(&named)?;
        let segment = move |values: &[&Tensor]| {
            let direction = if GradMode::enabled() { Direction::Backward } else { Direction::Forward };
            unchanged(&versions_at_forward, &name, &named)?;
            let span = engine.segment_backward(number).filter(|_| direction == Direction::Backward);
            within_span(span.as_ref(), values, |values| {
                let run = || part.run(|block| block.forward_with(values, &context.borrow()));
                engine.computing(number, direction, run)
            })
        };
        recomputed(segment, values, &self.engine, number)
    }
}

fn handles(block: &FunctionalCall<dyn Block>) -> Vec<(String, Tensor)> {
    block.named().iter().map(|(name, tensor, _)| (name.clone(), tensor.shallow_clone())).collect()
}
