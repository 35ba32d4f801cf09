//! What moves layers.
//!
//! ```text
//!            prefetch stream                      compute                       store stream        host thread
//! home ──► wait free[s] · copy · record ready[s] ──► wait ready[s] · run · record free[s]
//!                                                        gradients ──────────► copy to host ──► add up, or step
//! ```
//!
//! A slot is device memory for one layer. Who computes holds a lease; a slot without one goes to the layer that is needed next
//! ([`schedule`](crate::schedule)). The tensors that a layer runs on are views of its slot, made for one use: they share the slot's
//! version, so that a graph which outlives its lease refuses to go on once the slot has been written again.

mod gradients;
mod ring;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use models::module::Role;
use models::tensors_file::Stored;
use parking_lot::Mutex;
use runtime::device::{self, Event, Stream};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::home::{Homing, Layer, Piece};
use crate::options::{Options, Point};
use crate::schedule::Direction;
use crate::trace::{Lane, Span, Trace};
use gradients::Rooms;
pub(crate) use gradients::{Arriving, Gradients, Sink};
pub(crate) use ring::Lease;
use ring::Slots;

/// A handle on the engine of a model.
#[derive(Clone)]
pub(crate) struct Engine(Arc<Inner>);

struct Inner {
    options: Options,
    homing: Homing,
    prefetch: Stream,
    store: Stream,
    /// A thread of the host: adds gradients up, and runs the optimizer.
    host: Stream,
    trace: Trace,
    rooms: Rooms,
    state: Mutex<State>,
    /// Removes the file tier's files.
    _folder: Option<tempfile::TempDir>,
}

#[derive(Default)]
struct State {
    layers: Vec<Layer>,
    ring: Option<Slots>,
    sink: Option<Arc<dyn Sink>>,
    /// When the gradients of the last layers have left the device.
    leaving: VecDeque<Arc<Event>>,
    /// Whether the end of the running backward is awaited already.
    ending: bool,
    /// Uses that have not ended, of the ring and besides it.
    uses: usize,
    counters: Counters,
}

/// What was moved, in bytes, and how often a use had to wait for a load that nobody had begun ahead.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// To the device.
    pub loaded: u64,
    /// To the host.
    pub stored: u64,
    /// Loads.
    pub loads: u64,
    /// Loads that began only when the layer was needed.
    pub late: u64,
}

impl Engine {
    /// An engine without layers.
    pub(crate) fn new(options: Options) -> Result<Self> {
        options.check()?;
        let device = options.device;
        let folder = match &options.tier {
            crate::Tier::Host => None,
            crate::Tier::File(folder) => {
                let made = tempfile::Builder::new().prefix("offload-").tempdir_in(folder);
                Some(made.map_err(|cause| Error::File {
                    path: folder.clone(),
                    reason: format!("no folder for the layers can be made in it: {cause}"),
                })?)
            }
        };
        let homing = Homing {
            pinned_for: if options.pinned { device } else { Device::Cpu },
            folder: folder.as_ref().map(|folder| folder.path().to_owned()),
        };
        Ok(Self(Arc::new(Inner {
            homing,
            prefetch: Stream::high_priority(device)?,
            store: Stream::high_priority(device)?,
            host: Stream::new(Device::Cpu)?,
            trace: Trace::default(),
            rooms: Rooms::default(),
            state: Mutex::default(),
            _folder: folder,
            options,
        })))
    }

    pub(crate) fn options(&self) -> &Options {
        &self.0.options
    }

    pub(crate) fn device(&self) -> Device {
        self.0.options.device
    }

    /// Takes a layer home. Returns its number.
    pub(crate) fn add(
        &self,
        (name, number): (&str, usize),
        named: &[(String, Tensor, Role)],
        stored: &dyn Fn(&str) -> Option<Stored>,
    ) -> Result<usize> {
        let layer = Layer::new((name, number), named, &self.0.homing, stored)?;
        self.release_ring()?;
        let mut state = self.0.state.lock();
        state.layers.push(layer);
        Ok(state.layers.len() - 1)
    }

    /// Takes a layer home again whose tensors are others than before.
    pub(crate) fn replace(&self, layer: usize, named: &[(String, Tensor, Role)]) -> Result<()> {
        let (name, number) = {
            let state = self.0.state.lock();
            let old = &state.layers[layer];
            let same = old.tensors.len() == named.len()
                && old.astray().is_none()
                && old.tensors.iter().zip(named).all(|(old, (_, new, _))| old.data_ptr() == new.data_ptr());
            if same {
                return Ok(());
            }
            (old.name.clone(), old.number)
        };
        self.synchronize()?;
        let files = self.0.state.lock().layers[layer].files();
        let homing = Homing { folder: None, ..self.0.homing.clone() };
        let new = Layer::new((&name, number), named, &homing, &|tensor| files.get(tensor).cloned())?;
        self.release_ring()?;
        self.0.state.lock().layers[layer] = new;
        Ok(())
    }

    /// Runs something on the layers, with the lock held.
    pub(crate) fn with_layers<R>(&self, body: impl FnOnce(&mut Vec<Layer>) -> R) -> R {
        body(&mut self.0.state.lock().layers)
    }

    pub(crate) fn set_sink(&self, sink: Option<Arc<dyn Sink>>) {
        self.0.state.lock().sink = sink;
    }

    pub(crate) fn counters(&self) -> Counters {
        self.0.state.lock().counters
    }

    pub(crate) fn start_trace(&self) -> Result<()> {
        self.synchronize()?;
        self.0.trace.start(self.device())
    }

    pub(crate) fn take_trace(&self) -> Result<Vec<Span>> {
        self.synchronize()?;
        device::synchronize(self.device())?;
        self.0.trace.take()
    }

    /// Waits for all that is on its way.
    pub(crate) fn synchronize(&self) -> Result<()> {
        // Each is waited for, whatever the others say.
        let results = [self.0.prefetch.synchronize(), self.0.store.synchronize(), self.0.host.synchronize()];
        Ok(results.into_iter().collect::<runtime::Result<()>>()?)
    }

    /// Device memory of the ring.
    pub(crate) fn ring_bytes(&self) -> u64 {
        let state = self.0.state.lock();
        state.ring.as_ref().map_or(0, |ring| ring.slots.iter().map(|slot| slot.bytes.numel() as u64).sum())
    }

    /// Gives the ring's memory back; the next use takes it again.
    pub(crate) fn release_ring(&self) -> Result<()> {
        if self.0.state.lock().ring.is_none() {
            return Ok(());
        }
        self.synchronize()?;
        device::synchronize(self.device())?;
        self.0.state.lock().ring = None;
        Ok(())
    }

    /// That no layer is anywhere but at home: the assignment's `test_model_on_cpu`.
    pub(crate) fn check_at_home(&self) -> Result<()> {
        let state = self.0.state.lock();
        if state.uses > 0 || state.ring.as_ref().is_some_and(|ring| ring.ring.in_use()) {
            return Err(Error::config(
                "layers",
                "a layer is in use; expected all of them at home between passes",
            ));
        }
        for layer in &state.layers {
            if let Some(index) = layer.astray() {
                let reason =
                    format!("tensor {index} of `{}` is not at home; was its memory exchanged?", layer.name);
                return Err(Error::config("layers", reason));
            }
        }
        Ok(())
    }

    /// Marks a stretch of computing in the block of that number.
    pub(crate) fn computing<R>(
        &self,
        number: usize,
        direction: Direction,
        body: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        self.0.options.at(Point::Compute)?;
        let current = Stream::current(self.device())?;
        let begin = self.0.trace.begin(&current)?;
        let result = body()?;
        self.0.trace.end(&current, begin, (Lane::Compute, number, direction), 0)?;
        Ok(result)
    }

    /// Brings a layer into memory of its own, now: one layer at a time, and nothing meanwhile.
    pub(crate) fn fetch(&self, layer: usize, direction: Direction) -> Result<Fetched> {
        let (pieces, (layout, flat, number, updated), bytes, in_files) = {
            let mut state = self.0.state.lock();
            let of = &state.layers[layer];
            of.check()?;
            let flat = Tensor::f_empty([of.layout.bytes as i64], (Kind::Uint8, self.device()))
                .map_err(|error| self.refused("bringing", &of.name, error.into()))?;
            let result = (
                of.pieces(&flat)?,
                (of.layout.clone(), flat, of.number, of.updated.clone()),
                of.bytes(),
                of.is_in_files(),
            );
            state.uses += 1;
            state.counters.loads += 1;
            state.counters.late += 1;
            state.counters.loaded += result.2;
            result
        };
        // From here on its end is counted, whatever happens.
        let mut fetched = Fetched { engine: self.clone(), leaves: Vec::new() };
        let current = Stream::current(self.device())?;
        let begin = self.0.trace.begin(&current)?;
        let copied = (|| {
            if let Some(updated) = updated {
                updated.synchronize()?;
            }
            self.0.options.at(Point::Load)?;
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
        copied.map_err(|error| self.refused("bringing", &self.name(layer), error))?;
        self.0.trace.end(&current, begin, (Lane::Load, number, direction), bytes)?;
        fetched.leaves = self.leaves(layer, &layout.views(&flat)?)?;
        Ok(fetched)
    }

    fn staging(&self, piece: &Piece, target: &Tensor, in_files: bool) -> runtime::Result<Option<Tensor>> {
        let needed = in_files && matches!(piece, Piece::File(_)) && self.device() != Device::Cpu;
        needed.then(|| device::pinned_empty(&target.size(), Kind::Uint8, self.device())).transpose()
    }

    /// Tensors to compute with: one for each of the layer's, leaves of graphs of their own.
    fn leaves(&self, layer: usize, views: &[Tensor]) -> Result<Vec<Tensor>> {
        let state = self.0.state.lock();
        views
            .iter()
            .zip(&state.layers[layer].tensors)
            .map(|(view, tensor)| {
                // It shares the version of the memory, and not its history.
                Ok(view.f_detach()?.f_set_requires_grad(tensor.requires_grad())?)
            })
            .collect()
    }

    /// Forgets that an end is awaited, after a backward that failed before it.
    fn recover(&self) {
        // What failed is an error of someone already; the lanes are made usable again, and what the slots hold is not known.
        let _ = self.synchronize();
        let mut state = self.0.state.lock();
        state.ending = false;
        if let Some(Slots { ring, slots }) = &mut state.ring {
            ring.clear();
            slots.iter_mut().for_each(|slot| slot.holds = None);
        }
    }

    /// Begins a pass anew where the last one failed on its way.
    pub(crate) fn begin_forward(&self) {
        let mut state = self.0.state.lock();
        if state.uses == 0 {
            state.ending = false;
        }
    }

    fn name(&self, layer: usize) -> String {
        self.0.state.lock().layers[layer].name.clone()
    }

    fn refused(&self, what: &'static str, layer: &str, cause: runtime::Error) -> Error {
        Error::Transfer { what, layer: layer.to_owned(), cause: Box::new(cause) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The ring's memory goes back to the allocator, and what is on its way into it has to be there first. A failure was, or
        // would have been, an error of whoever waits for it.
        let _ = self.prefetch.synchronize();
        let _ = self.store.synchronize();
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("options", &self.0.options).finish_non_exhaustive()
    }
}

/// A layer on the device, for one use, in memory of its own.
#[derive(Debug)]
pub(crate) struct Fetched {
    engine: Engine,
    pub(crate) leaves: Vec<Tensor>,
}

impl Drop for Fetched {
    fn drop(&mut self) {
        self.engine.0.state.lock().uses -= 1;
    }
}
