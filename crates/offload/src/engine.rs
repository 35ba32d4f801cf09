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

use std::fmt;
use std::sync::Arc;

use models::module::Role;
use models::tensors_file::Stored;
use parking_lot::Mutex;
use runtime::autograd::{GradMode, set_grad};
use runtime::device::{self, Event, Stream};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::home::{Homing, Layer, Piece};
use crate::occupancy::{Inside, Occupancy};
use crate::options::{Options, Point};
use crate::schedule::{Access, Direction, Ring};
use crate::trace::{Lane, Span, Trace};

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
    state: Mutex<State>,
    /// Removes the file tier's files.
    _folder: Option<tempfile::TempDir>,
}

#[derive(Default)]
struct State {
    layers: Vec<Layer>,
    ring: Option<Slots>,
    sink: Option<Arc<dyn Sink>>,
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

struct Slots {
    ring: Ring,
    slots: Vec<Slot>,
}

struct Slot {
    bytes: Tensor,
    /// Pinned memory that a file's values go through, where the device is not the host.
    staging: Option<Tensor>,
    /// When the host has read the file and queued its copy; of the CPU.
    staged: Arc<Event>,
    /// When the layer is there.
    ready: Arc<Event>,
    /// When the last use is over.
    free: Arc<Event>,
    occupancy: Occupancy,
    /// The layer's generation and versions when its load was queued.
    holds: Option<(u64, Vec<i64>)>,
}

/// Who takes gradients that arrive from a layer's backward.
pub(crate) trait Sink: Send + Sync {
    /// Gradients of the layer's trained tensors, by their number, on the device.
    fn deliver(&self, engine: &Engine, layer: usize, gradients: Vec<(usize, Tensor)>) -> Result<()>;
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
        let mut state = self.0.state.lock();
        state.layers.push(layer);
        state.ring = None;
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
        let mut state = self.0.state.lock();
        state.layers[layer] = new;
        state.ring = None;
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

    /// Begins a use of a layer in the ring, and sends for those that come next.
    pub(crate) fn acquire(&self, layer: usize, direction: Direction) -> Result<Lease> {
        let (slot, views, staged, ready, free, occupancy) = {
            let mut state = self.0.state.lock();
            self.ensure_ring(&mut state)?;
            let State { layers, ring, counters, uses, .. } = &mut *state;
            layers[layer].check()?;
            let Slots { ring, slots } = ring.as_mut().expect("it was just made");
            let is_current = |slot: usize, layer: usize| {
                let layer: &Layer = &layers[layer];
                matches!(&slots[slot].holds, Some((generation, versions))
                    if *generation == layer.generation && *versions == layer.versions())
            };
            let access = Access { layer, direction };
            let Some((slot, load)) = ring.acquire(access, &is_current) else {
                let reason = format!(
                    "all {} slots are in use, and `{}` needs one; give it more slots, or run backward before the next forward",
                    slots.len(),
                    layers[layer].name
                );
                return Err(Error::config("ring", reason));
            };
            *uses += 1;
            // Trained layers are not read ahead across the end of a step, when an optimizer that the engine does not know may
            // be writing them; the engine's own is waited for.
            let may_load = |now: Access, coming: Access| {
                let crosses = coming.direction == Direction::Forward
                    && (now.direction == Direction::Backward || coming.layer <= now.layer);
                !crosses || layers[coming.layer].settled || !layers[coming.layer].is_trained()
            };
            let ahead = ring.prefetch(&is_current, &may_load);
            let mut order = Vec::new();
            if load {
                counters.late += 1;
                order.push((slot, layer, direction));
            }
            order.extend(ahead.iter().map(|load| (load.slot, load.layer, direction)));
            for (slot, layer, direction) in order {
                counters.loads += 1;
                counters.loaded += layers[layer].bytes();
                self.load(&mut slots[slot], &layers[layer], direction)?;
            }
            let views = layers[layer].layout.views(&slots[slot].bytes)?;
            let Slot { staged, ready, free, occupancy, .. } = &slots[slot];
            (slot, views, staged.clone(), ready.clone(), free.clone(), occupancy.clone())
        };
        let mut lease =
            Lease { engine: self.clone(), slot, free, leaves: Vec::new(), inside: None, ended: false };
        let arrived = (|| {
            self.0.options.at(Point::Event)?;
            staged.synchronize()?;
            Stream::current(self.device())?.wait(&ready)?;
            if self.device() == Device::Cpu {
                lease.inside = Some(occupancy.read()?);
            }
            Ok(())
        })();
        if let Err(error) = arrived {
            let error = self.refused("bringing", &self.name(layer), error);
            drop(lease);
            self.recover();
            return Err(error);
        }
        lease.leaves = self.leaves(layer, &views)?;
        Ok(lease)
    }

    /// Sends for the layers that come next, after the engine's own optimizer has queued its changes.
    pub(crate) fn send_ahead(&self) -> Result<()> {
        let mut state = self.0.state.lock();
        let State { layers, ring, counters, .. } = &mut *state;
        let Some(Slots { ring, slots }) = ring else { return Ok(()) };
        let is_current = |slot: usize, layer: usize| {
            let layer: &Layer = &layers[layer];
            matches!(&slots[slot].holds, Some((generation, versions))
                if *generation == layer.generation && *versions == layer.versions())
        };
        for load in ring.prefetch(&is_current, &|_, coming| layers[coming.layer].settled) {
            counters.loads += 1;
            counters.loaded += layers[load.layer].bytes();
            self.load(&mut slots[load.slot], &layers[load.layer], Direction::Forward)?;
        }
        Ok(())
    }

    /// Queues a layer's way into a slot.
    fn load(&self, slot: &mut Slot, layer: &Layer, direction: Direction) -> Result<()> {
        let prefetch = &self.0.prefetch;
        prefetch.wait(&slot.free)?;
        if let Some(updated) = &layer.updated {
            prefetch.wait(updated)?;
        }
        let pieces = layer.pieces(&slot.bytes)?;
        let (options, occupancy) = (self.0.options.clone(), slot.occupancy.clone());
        let on_host = self.device() == Device::Cpu;
        let what = (Lane::Load, layer.number, direction);
        slot.holds = Some((layer.generation, layer.versions()));
        if on_host || !layer.is_in_files() {
            let begin = self.0.trace.begin(prefetch)?;
            prefetch.submit(move || {
                options.at(Point::Load)?;
                let _alone = on_host.then(|| occupancy.write()).transpose()?;
                pieces.into_iter().try_for_each(|(piece, mut target)| piece.bring(&mut target, None))
            })?;
            self.0.trace.end(prefetch, begin, what, layer.bytes())?;
            prefetch.record(&slot.ready)?;
            return Ok(());
        }
        // The file is read by the host's thread, which then queues the copy; who computes waits for that first.
        let staging = match &slot.staging {
            Some(staging) => staging.shallow_clone(),
            None => {
                let made = device::pinned_empty(&slot.bytes.size(), Kind::Uint8, self.device())?;
                slot.staging.insert(made).shallow_clone()
            }
        };
        let (stream, ready, origin) = (prefetch.clone(), slot.ready.clone(), slot.bytes.data_ptr() as usize);
        self.0.host.wait(&slot.ready)?;
        self.0.host.submit(move || {
            options.at(Point::Load)?;
            for (piece, mut target) in pieces {
                let from = (target.data_ptr() as usize - origin) as i64;
                let staging = staging.f_narrow(0, from, target.size()[0])?;
                stream.submit(move || piece.bring(&mut target, Some(&staging)))?;
            }
            stream.record(&ready)
        })?;
        self.0.host.record(&slot.staged)?;
        Ok(())
    }

    fn ensure_ring(&self, state: &mut State) -> Result<()> {
        if state.ring.is_some() {
            return Ok(());
        }
        let device = self.device();
        let bytes = state.layers.iter().map(|layer| layer.layout.bytes).max().unwrap_or(0);
        let slots = self.0.options.ring.min(state.layers.len());
        let slot = |_| -> Result<Slot> {
            let room = Tensor::f_empty([bytes as i64], (Kind::Uint8, device));
            Ok(Slot {
                bytes: room
                    .map_err(|error| self.refused("making room", "a slot of the ring", error.into()))?,
                staging: None,
                staged: Arc::new(Event::untimed(Device::Cpu)?),
                ready: Arc::new(Event::untimed(device)?),
                free: Arc::new(Event::untimed(device)?),
                occupancy: Occupancy::default(),
                holds: None,
            })
        };
        let memory = (0..slots).map(slot).collect::<Result<Vec<_>>>()?;
        state.ring = Some(Slots { ring: Ring::new(slots, state.layers.len()), slots: memory });
        Ok(())
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

    /// Takes the gradients that a backward left at `leaves` to the host.
    pub(crate) fn deliver(&self, layer: usize, leaves: &[Tensor]) -> Result<()> {
        let trained: Vec<usize> = self.with_layers(|layers| layers[layer].trained().collect());
        let mut gradients = Vec::new();
        for index in trained {
            let gradient = leaves[index].f_grad()?;
            if gradient.defined() {
                set_grad(&leaves[index], None)?;
                gradients.push((index, gradient));
            }
        }
        let sink = self.0.state.lock().sink.clone();
        match sink {
            Some(sink) => sink.deliver(self, layer, gradients),
            None => self.keep(layer, gradients),
        }
    }

    /// Adds gradients to those of the model's own tensors, in the host's memory. They are there when the stream's work is done.
    pub(crate) fn keep(&self, layer: usize, gradients: Vec<(usize, Tensor)>) -> Result<()> {
        let current = Stream::current(self.device())?;
        let computed = Event::untimed(self.device())?;
        current.record(&computed)?;
        let (store, host) = (&self.0.store, &self.0.host);
        store.wait(&computed)?;
        let mut state = self.0.state.lock();
        let State { layers, counters, .. } = &mut *state;
        let of = &mut layers[layer];
        let mut work = Vec::new();
        for (index, gradient) in gradients {
            let tensor = of.tensors[index].shallow_clone();
            let sum = tensor.f_grad()?;
            counters.stored += (gradient.numel() * gradient.kind().elt_size_in_bytes()) as u64;
            if sum.defined() {
                work.push((sum, gradient, true));
            } else {
                let room = of.gradient_room(index, self.0.homing.pinned_for)?;
                set_grad(&tensor, Some(&room))?;
                work.push((room, gradient, false));
            }
        }
        let bytes = of.gradient_bytes();
        let begin = self.0.trace.begin(store)?;
        let (mut additions, on_host) = (Vec::new(), self.device() == Device::Cpu);
        let mut copies = Vec::new();
        for (target, gradient, adds) in work {
            device::record_stream(&gradient, store)?;
            if adds && !on_host {
                let staging = device::pinned_empty(&gradient.size(), gradient.kind(), self.device())?;
                copies.push((staging.shallow_clone(), gradient, false));
                additions.push((target, staging));
            } else {
                copies.push((target, gradient, adds));
            }
        }
        let options = self.0.options.clone();
        store.submit(move || {
            options.at(Point::Store)?;
            let _no_grad = GradMode::off();
            for (mut target, gradient, adds) in copies {
                if adds {
                    let _ = target.f_add_(&gradient)?;
                } else if on_host && gradient.is_contiguous() {
                    device::copy_on_this_thread(&target, &gradient)?;
                } else {
                    device::copy_async(&mut target, &gradient)?;
                }
            }
            Ok(())
        })?;
        self.0.trace.end(store, begin, (Lane::Store, of.number, Direction::Backward), bytes)?;
        let copied = Arc::new(Event::untimed(self.device())?);
        store.record(&copied)?;
        of.arrived = vec![copied.clone()];
        if !additions.is_empty() {
            host.wait(&copied)?;
            host.submit(move || {
                let _no_grad = GradMode::off();
                additions.into_iter().try_for_each(|(mut sum, part)| Ok(sum.f_add_(&part).map(drop)?))
            })?;
            let added = Arc::new(Event::untimed(Device::Cpu)?);
            host.record(&added)?;
            of.arrived.push(added);
        }
        Ok(())
    }

    /// Takes gradients to the host for one use there, without adding them to any: where the device is the host they are there. They are
    /// when the events are complete.
    pub(crate) fn bring_home(
        &self,
        layer: usize,
        gradients: Vec<(usize, Tensor)>,
    ) -> Result<(Vec<(usize, Tensor)>, Vec<Arc<Event>>)> {
        let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        let total = gradients.iter().map(|(_, gradient)| bytes(gradient)).sum::<u64>();
        let number = {
            let mut state = self.0.state.lock();
            state.counters.stored += total;
            state.layers[layer].number
        };
        let computed = Arc::new(Event::untimed(self.device())?);
        Stream::current(self.device())?.record(&computed)?;
        self.0.options.at(Point::Store)?;
        if self.device() == Device::Cpu {
            return Ok((gradients, vec![computed]));
        }
        let store = &self.0.store;
        store.wait(&computed)?;
        let begin = self.0.trace.begin(store)?;
        let mut home = Vec::new();
        for (index, gradient) in gradients {
            device::record_stream(&gradient, store)?;
            let room = device::pinned_empty(&gradient.size(), gradient.kind(), self.0.homing.pinned_for)?;
            let mut target = room.shallow_clone();
            store.submit(move || {
                let _no_grad = GradMode::off();
                device::copy_async(&mut target, &gradient)
            })?;
            home.push((index, room));
        }
        self.0.trace.end(store, begin, (Lane::Store, number, Direction::Backward), total)?;
        let copied = Arc::new(Event::untimed(self.device())?);
        store.record(&copied)?;
        Ok((home, vec![copied]))
    }

    /// Queues a change of a layer's tensors at home on the host's thread, behind `after` and behind every load that was queued before.
    /// What the slots hold of the layer is old from here on. Returns when the change is done.
    pub(crate) fn update(
        &self,
        layer: usize,
        after: &[Arc<Event>],
        work: impl FnOnce() -> runtime::Result<()> + Send + 'static,
    ) -> Result<Arc<Event>> {
        let host = &self.0.host;
        let read = Event::untimed(self.device())?;
        self.0.prefetch.record(&read)?;
        host.wait(&read)?;
        for event in after {
            host.wait(event)?;
        }
        let mut state = self.0.state.lock();
        let of = &mut state.layers[layer];
        let begin = self.0.trace.begin(host)?;
        let options = self.0.options.clone();
        host.submit(move || {
            options.at(Point::Update)?;
            work()
        })?;
        self.0.trace.end(host, begin, (Lane::Host, of.number, Direction::Backward), 0)?;
        let updated = Arc::new(Event::untimed(Device::Cpu)?);
        host.record(&updated)?;
        of.generation += 1;
        of.updated = Some(updated.clone());
        of.settled = true;
        Ok(updated)
    }

    /// A gradient in memory of the host's own, now.
    pub(crate) fn to_host(&self, layer: usize, gradient: &Tensor) -> Result<Tensor> {
        let number = {
            let mut state = self.0.state.lock();
            state.counters.stored += (gradient.numel() * gradient.kind().elt_size_in_bytes()) as u64;
            state.layers[layer].number
        };
        self.0.options.at(Point::Store)?;
        let current = Stream::current(self.device())?;
        let begin = self.0.trace.begin(&current)?;
        let mut home = device::pinned_empty(&gradient.size(), gradient.kind(), self.0.homing.pinned_for)?;
        {
            let _no_grad = GradMode::off();
            home.f_copy_(gradient)?;
        }
        let bytes = (gradient.numel() * gradient.kind().elt_size_in_bytes()) as u64;
        self.0.trace.end(&current, begin, (Lane::Store, number, Direction::Backward), bytes)?;
        Ok(home)
    }

    /// At the end of the backward that is running: waits for what the caller of backward expects to be done.
    pub(crate) fn await_end(&self, backward: &runtime::autograd::Backward) -> Result<()> {
        if std::mem::replace(&mut self.0.state.lock().ending, true) {
            return Ok(());
        }
        let engine = self.clone();
        Ok(backward.at_end(move || {
            let steps = {
                let mut state = engine.0.state.lock();
                state.ending = false;
                state.sink.is_some()
            };
            engine.0.store.synchronize()?;
            // The optimizer of the engine says itself when it is to be waited for.
            if !steps {
                engine.0.host.synchronize()?;
            }
            Ok(engine.check_at_home()?)
        })?)
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

/// A layer in a slot, for one use.
#[derive(Debug)]
pub(crate) struct Lease {
    engine: Engine,
    slot: usize,
    free: Arc<Event>,
    pub(crate) leaves: Vec<Tensor>,
    inside: Option<Inside>,
    ended: bool,
}

impl Lease {
    fn end(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        self.inside = None;
        self.engine.0.options.at(Point::Event)?;
        Stream::current(self.engine.device())?.record(&self.free)?;
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // On a device that fails here nothing else works either, and the next use says so.
        let _ = self.end();
        let mut state = self.engine.0.state.lock();
        state.uses -= 1;
        if let Some(slots) = &mut state.ring {
            slots.ring.release(self.slot);
        }
    }
}
