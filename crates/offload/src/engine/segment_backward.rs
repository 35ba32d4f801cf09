//! The compute span of a segment's backward, which autograd runs after the segment was recomputed.
//!
//! Two identities in the graph mark its ends: the backward of the one on the segment's output runs first, that of the one on its input
//! last. A segment whose input requires no gradient ends with the gradients of its weights.

use std::sync::Arc;

use parking_lot::Mutex;
use runtime::autograd::{Backward, Forward, Function, apply};
use runtime::device::{Event, Stream};
use tch::Tensor;

use super::Engine;
use crate::schedule::Direction;
use crate::trace::StreamKind;

/// A span that begins and ends in the course of a backward.
#[derive(Clone)]
pub(crate) struct SegmentBackward {
    engine: Engine,
    number: usize,
    begun: Arc<Mutex<Option<Event>>>,
}

impl SegmentBackward {
    pub(super) fn new(engine: Engine, number: usize) -> Self {
        Self { engine, number, begun: Arc::default() }
    }

    /// Returns `output` with a mark of the beginning.
    pub(crate) fn begins_at(&self, output: &Tensor) -> runtime::Result<Tensor> {
        self.mark(output, Self::begin)
    }

    /// Returns `input` with a mark of the end.
    pub(crate) fn ends_at(&self, input: &Tensor) -> runtime::Result<Tensor> {
        self.mark(input, Self::end)
    }

    fn mark(&self, tensor: &Tensor, action: Action) -> runtime::Result<Tensor> {
        let [y] = apply(Mark { span: self.clone(), action }, &[tensor])?;
        Ok(y)
    }

    fn begin(&self) -> runtime::Result<()> {
        let current = Stream::current(self.engine.device())?;
        *self.begun.lock() = self.engine.0.trace.begin(&current)?;
        Ok(())
    }

    /// Ends the span, if it has begun and not ended.
    pub(crate) fn end(&self) -> runtime::Result<()> {
        let Some(begun) = self.begun.lock().take() else { return Ok(()) };
        let current = Stream::current(self.engine.device())?;
        let what = (StreamKind::Compute, self.number, Direction::Backward);
        self.engine.0.trace.end(&current, Some(begun), what, 0)
    }
}

type Action = fn(&SegmentBackward) -> runtime::Result<()>;

/// The identity, whose backward does something.
struct Mark {
    span: SegmentBackward,
    action: Action,
}

impl Function for Mark {
    fn forward(&mut self, _: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        Ok(vec![inputs[0].shallow_clone()])
    }

    fn backward(
        &self,
        _: &mut Backward,
        gradients: Vec<Option<Tensor>>,
    ) -> runtime::Result<Vec<Option<Tensor>>> {
        (self.action)(&self.span)?;
        Ok(gradients)
    }
}
