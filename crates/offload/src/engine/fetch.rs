//! Loads a layer into its own memory, for one use.

use std::thread::{self, ThreadId};

use runtime::device::{self, Event, Stream};
use runtime::memory::MovableMemory;
use tch::{Device, Kind, Tensor};

use super::{Engine, State};
use crate::error::{Result, transfer};
use crate::options::HookPoint;
use crate::schedule::Direction;
use crate::storage::Piece;
use crate::trace::StreamKind;

impl Engine {
    /// Loads a layer into its own memory, synchronously.
    pub(crate) fn fetch(&self, layer: usize, direction: Direction) -> Result<Fetched> {
        let (pieces, (layout, flat, number, updated), bytes, in_files) = {
            let mut state = self.0.state.lock();
            state.layers[layer].look(self.0.placement.pinned_for)?;
            let source = &state.layers[layer];
            let flat = Tensor::f_empty([source.layout.bytes as i64], (Kind::Uint8, self.device()))
                .map_err(|error| transfer("loading", &source.name, error.into()))?;
            let result = (
                source.pieces(&flat)?,
                (source.layout.clone(), source.memory(&flat), source.number, source.updated.clone()),
                source.bytes(),
                source.is_in_files(),
            );
            state.counters.loads += 1;
            state.counters.late += 1;
            state.counters.loaded += result.2;
            result
        };
        let mut fetched = Fetched { leaves: Vec::new(), _use: Use::begin(self, &mut self.0.state.lock()) };
        let current = Stream::current(self.device())?;
        let begin = self.0.trace.begin(&current)?;
        let copied = (|| {
            if let Some(updated) = updated {
                updated.synchronize()?;
            }
            self.0.options.at(HookPoint::Load)?;
            for (piece, mut target) in pieces {
                let staging = self.staging(&piece, &target, in_files)?;
                piece.bring(&mut target, staging.as_ref())?;
                if let Some(staging) = staging {
                    device::synchronize(self.device())?;
                    drop(staging);
                }
            }
            Ok(())
        })();
        copied.map_err(|error| transfer("loading", &self.name(layer), error))?;
        if self.device() != Device::Cpu {
            // The copies may still run; writers of the host memory wait for them.
            let read = Event::untimed(self.device())?;
            current.record(&read)?;
            let mut state = self.0.state.lock();
            state.reads.retain(|event| !event.query().unwrap_or(true));
            state.reads.push(read);
        }
        self.0.trace.end(&current, begin, (StreamKind::Load, number, direction), bytes)?;
        fetched.leaves = self.leaves(layer, &layout.views(&flat)?)?;
        Ok(fetched)
    }

    fn staging(&self, piece: &Piece, target: &Tensor, in_files: bool) -> runtime::Result<Option<Tensor>> {
        let needed = in_files && matches!(piece, Piece::File(_)) && self.device() != Device::Cpu;
        needed.then(|| device::pinned_empty(&target.size(), Kind::Uint8, self.device())).transpose()
    }

    /// Returns tensors to compute with whose memory is attached for each use, so that a graph of one use is good for another.
    pub(crate) fn movable_leaves(&self, layer: usize) -> Result<(MovableMemory, Vec<Tensor>)> {
        let layout = self.0.state.lock().layers[layer].layout.clone();
        let memory = MovableMemory::new(layout.bytes, self.device())?;
        let leaves = self.leaves(layer, &layout.views(memory.bytes())?)?;
        Ok((memory, leaves))
    }

    /// Returns the tensors to compute with: for each of the layer's, a leaf of its own graph.
    pub(super) fn leaves(&self, layer: usize, views: &[Tensor]) -> Result<Vec<Tensor>> {
        let state = self.0.state.lock();
        views
            .iter()
            .zip(&state.layers[layer].tensors)
            .map(|(view, tensor)| {
                // Shares the version of the memory, not its history.
                Ok(view.f_detach()?.f_set_requires_grad(tensor.requires_grad())?)
            })
            .collect()
    }
}

/// A layer on the device in its own memory, for one use.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) leaves: Vec<Tensor>,
    _use: Use,
}

/// A use of a layer by a thread, counted until it is dropped.
#[derive(Debug)]
pub(super) struct Use {
    engine: Engine,
    thread: ThreadId,
}

impl Use {
    pub(super) fn begin(engine: &Engine, state: &mut State) -> Self {
        let thread = thread::current().id();
        *state.uses.entry(thread).or_default() += 1;
        Self { engine: engine.clone(), thread }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut state = self.engine.0.state.lock();
        if let Some(uses) = state.uses.get_mut(&self.thread) {
            *uses -= 1;
            if *uses == 0 {
                state.uses.remove(&self.thread);
            }
        }
    }
}
