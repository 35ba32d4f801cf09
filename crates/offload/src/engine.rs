//! What moves layers.
//!
//! ```text
//!            prefetch stream                      compute                       store stream        host thread
//! home ──► wait free[s] · copy · record ready[s] ──► wait ready[s] · run · record free[s]
//!                                                        gradients ──────────► copy to host ──► add up, or step
//! ```
//!
//! What a stream of a GPU would have to wait for on the host (a file that is read, a layer's step) a second thread of the host waits
//! for, the feeder, and queues the load then: whoever acquires a layer is not held up by another one's.
//!
//! A slot is device memory for one layer. Who computes holds a lease; a slot without one goes to the layer that is needed next
//! ([`schedule`](crate::schedule)). The tensors that a layer runs on are views of its slot, made for one use: they share the slot's
//! version, so that a graph which outlives its lease refuses to go on once the slot has been written again.

mod fetch;
mod gradients;
mod graph;
mod pass;
mod ring;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use models::module::Role;
use models::tensors_file::TensorLocation;
use parking_lot::{Mutex, MutexGuard};
use runtime::device::{self, Event, Stream};
use runtime::precision::identity;
use tch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::home::{Homing, Layer, Left, own_folder};
use crate::options::{Options, Point};
use crate::schedule::Direction;
use crate::trace::{Lane, Span, Trace};
pub(crate) use fetch::Fetched;
use fetch::Use;
use gradients::Rooms;
pub(crate) use gradients::{Arriving, Gradients, Sink};
pub(crate) use graph::Outstanding;
use pass::Ending;
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
    /// A thread of the host: queues loads that wait for something on the host.
    feeder: Stream,
    trace: Arc<Trace>,
    rooms: Rooms,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    layers: Vec<Layer>,
    ring: Option<Slots>,
    sink: Option<Arc<dyn Sink>>,
    /// When the gradients of the last layers have left the device.
    leaving: VecDeque<Arc<Event>>,
    /// The running backwards: one entry for each layer that has come.
    endings: Vec<Weak<Ending>>,
    /// A failure of a step on the host that no one has been told of.
    untold: Option<runtime::Error>,
    /// Uses that have not ended, of the ring and besides it, by the thread that computes.
    uses: HashMap<ThreadId, usize>,
    /// When copies from home on streams of who computes are done.
    reads: Vec<Event>,
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
                // That one can be made is better known before the first layer.
                own_folder(folder)?;
                Some(folder.clone())
            }
        };
        let homing = Homing { pinned_for: if options.pinned { device } else { Device::Cpu }, folder };
        Ok(Self(Arc::new(Inner {
            homing,
            prefetch: Stream::high_priority(device)?,
            store: Stream::high_priority(device)?,
            host: Stream::new(Device::Cpu)?,
            feeder: Stream::new(Device::Cpu)?,
            trace: Arc::default(),
            rooms: Rooms::default(),
            state: Mutex::default(),
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
        stored: &dyn Fn(&str) -> Option<TensorLocation>,
    ) -> Result<usize> {
        let left = |name: &str, _: &Tensor| stored(name).map(Left::At);
        let layer = Layer::new((name, number), named, &self.0.homing, &left)?;
        self.release_ring()?;
        let mut state = self.0.state.lock();
        state.layers.push(layer);
        Ok(state.layers.len() - 1)
    }

    /// Takes a layer home again whose tensors are others than before. Where that fails the layer cannot be used any more.
    pub(crate) fn replace(&self, layer: usize, named: &[(String, Tensor, Role)]) -> Result<()> {
        {
            let state = self.0.state.lock();
            let old = &state.layers[layer];
            let mut same = old.tensors.len() == named.len();
            for (old, (_, new, _)) in old.tensors.iter().zip(named) {
                same = same && identity(old)? == identity(new)?;
            }
            if same {
                return Ok(());
            }
        }
        // The layer changes whatever failed before; who asks next is told.
        let _ = self.settle();
        let mut state = self.0.state.lock();
        let old = &state.layers[layer];
        let homing = Homing { folder: None, ..self.0.homing.clone() };
        let left = |name: &str, tensor: &Tensor| old.left(name, tensor);
        let new = Layer::new((&old.name, old.number), named, &homing, &left);
        let result = match new {
            Ok(mut new) => {
                // Slots that hold the old one are never taken for the new one.
                (new.generation, new.steps) = (old.generation + 1, old.steps);
                new.ahead.clone_from(&old.ahead);
                new.outstanding = old.outstanding.clone();
                state.layers[layer] = new;
                Ok(())
            }
            Err(error) => {
                let reason = format!("`{}` could not be taken home after it was changed: {error}", old.name);
                state.layers[layer].lost = Some(reason);
                Err(error)
            }
        };
        drop(state);
        result.and(self.release_ring())
    }

    /// Runs something on the layers, with the lock held.
    pub(crate) fn with_layers<R>(&self, body: impl FnOnce(&mut Vec<Layer>) -> R) -> R {
        body(&mut self.0.state.lock().layers)
    }

    pub(crate) fn set_sink(&self, sink: Arc<dyn Sink>) -> Result<()> {
        let mut state = self.0.state.lock();
        if state.sink.is_some() {
            let reason =
                "there is a `HostAdamW` for these layers already, which takes their gradients; drop it first";
            return Err(Error::config("optimizer", reason));
        }
        state.sink = Some(sink);
        Ok(())
    }

    pub(crate) fn remove_sink(&self) {
        let mut state = self.0.state.lock();
        state.sink = None;
        state.layers.iter_mut().for_each(|layer| layer.ahead.clear());
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

    /// Waits for all that is on its way, and all that reads or writes memory of the home.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let settled = self.settle();
        match self.0.state.lock().untold.take() {
            Some(error) => Err(error.into()),
            None => settled,
        }
    }

    /// Waits for the lanes, and makes them usable again after a failure. That of a load is returned. One of gradients on their way takes
    /// all of them away, and fails every backward that is running. One of a step is remembered, for who asks next.
    fn settle(&self) -> Result<()> {
        self.settle_locked(&mut self.0.state.lock())
    }

    fn settle_locked(&self, state: &mut MutexGuard<'_, State>) -> Result<()> {
        // The feeder waits for the host, and the prefetch stream has what it queued.
        let (store, host) = (self.0.store.synchronize(), self.0.host.synchronize());
        let (feeder, prefetch) = (self.0.feeder.synchronize(), self.0.prefetch.synchronize());
        let reads = state.reads.drain(..).map(|event| event.synchronize()).fold(Ok(()), Result::and);
        for (failed, is_step) in [(store, false), (host, state.sink.is_some())] {
            let Err(error) = failed else { continue };
            Self::lose_gradients(state, &error.to_string());
            if is_step {
                state.untold.get_or_insert(error);
            }
        }
        Ok(feeder.and(prefetch).and(reads)?)
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
        let in_ring = state.ring.as_ref().is_some_and(|ring| ring.ring.in_use());
        Self::check_not_in_use(in_ring || state.uses.values().any(|&uses| uses > 0))?;
        Self::check_none_astray(&state)
    }

    fn check_not_in_use(in_use: bool) -> Result<()> {
        if in_use {
            return Err(Error::config(
                "layers",
                "a layer is in use; expected all of them at home between passes",
            ));
        }
        Ok(())
    }

    fn check_none_astray(state: &State) -> Result<()> {
        match state.layers.iter().find_map(Layer::astray) {
            Some(reason) => Err(Error::config("layers", reason)),
            None => Ok(()),
        }
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

    /// Makes the lanes usable again after a failure, which is an error of someone already. What the slots hold is not known.
    fn recover(&self) {
        let _ = self.settle();
        let mut state = self.0.state.lock();
        if let Some(Slots { ring, slots }) = &mut state.ring {
            ring.clear();
            slots.iter_mut().for_each(|slot| slot.holds = None);
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
        let _ = self.feeder.synchronize();
        let _ = self.prefetch.synchronize();
        let _ = self.store.synchronize();
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("options", &self.0.options).finish_non_exhaustive()
    }
}
