//! Gradients on their way home, and changes of what lives there.

use std::sync::Arc;

use parking_lot::Mutex;
use runtime::autograd::{GradMode, set_grad};
use runtime::device::{self, Event, Stream};
use tch::{Device, Tensor};

use super::{Engine, State};
use crate::error::{Error, Result};
use crate::home::Layer;
use crate::options::Point;
use crate::schedule::Direction;
use crate::trace::Lane;

/// Gradients of a layer's tensors, by their number, each on its way to the host or there.
pub(crate) type Gradients = Vec<(usize, Tensor)>;

/// Gradients at home, and the events that say when.
pub(crate) type Arriving = (Gradients, Vec<Arc<Event>>);

/// Layers whose gradients may be on their way at once. They are memory of the device until they have left: backward goes no further
/// ahead of the store stream than this.
const LEAVING: usize = 2;

/// Page-locked memory that is used again: to lock and unlock it takes longer than to copy into it, and stops the device.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rooms(Arc<Mutex<Vec<Tensor>>>);

impl Rooms {
    fn take(&self, like: &Tensor, pinned_for: Device) -> Result<Tensor> {
        let mut free = self.0.lock();
        let fits = |room: &Tensor| room.kind() == like.kind() && room.size() == like.size();
        match free.iter().position(fits) {
            Some(at) => Ok(free.swap_remove(at)),
            None => Ok(device::pinned_empty(&like.size(), like.kind(), pinned_for)?),
        }
    }

    /// Takes memory back that nobody uses any more.
    fn give(&self, room: Tensor) {
        self.0.lock().push(room);
    }
}

/// Who takes gradients that arrive from a layer's backward.
pub(crate) trait Sink: Send + Sync {
    /// Gradients of the layer's trained tensors, by their number, on the device.
    fn deliver(&self, engine: &Engine, layer: usize, gradients: Gradients) -> Result<()>;
}

impl Engine {
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

    /// Adds gradients to those of the model's own tensors, in the host's memory. They are there when the stream's work is done, and the
    /// tensors' own when the backward is. Until then the sums are out of autograd's sight: a weight that is used in the loss besides its
    /// layer gets a gradient from autograd too, at any time.
    pub(crate) fn keep(&self, layer: usize, gradients: Gradients) -> Result<()> {
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
            counters.stored += (gradient.numel() * gradient.kind().elt_size_in_bytes()) as u64;
            match of.sum(index)? {
                (Some(sum), other) => {
                    work.extend(other.map(|other| (sum.shallow_clone(), other, true)));
                    work.push((sum, gradient, true));
                }
                (None, _) => {
                    let room = of.gradient_room(index, self.0.homing.pinned_for)?;
                    of.pending[index] = Some(room.shallow_clone());
                    work.push((room, gradient, false));
                }
            }
        }
        let bytes = of.gradient_bytes();
        let begin = self.0.trace.begin(store)?;
        let (mut additions, on_host) = (Vec::new(), self.device() == Device::Cpu);
        let mut copies = Vec::new();
        for (target, gradient, adds) in work {
            device::record_stream(&gradient, store)?;
            if adds && !on_host {
                let staging = self.0.rooms.take(&gradient, self.0.homing.pinned_for)?;
                copies.push((staging.shallow_clone(), gradient, false));
                additions.push((target, staging));
            } else {
                copies.push((target, gradient, adds));
            }
        }
        let (options, name) = (self.0.options.clone(), of.name.clone());
        store.submit(move || {
            let stored = || {
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
            };
            stored().map_err(|cause| not_stored(&name, cause).into())
        })?;
        self.0.trace.end(store, begin, (Lane::Store, of.number, Direction::Backward), bytes)?;
        let copied = Arc::new(Event::untimed(self.device())?);
        store.record(&copied)?;
        of.arrived = vec![copied.clone()];
        if !additions.is_empty() {
            host.wait(&copied)?;
            let rooms = self.0.rooms.clone();
            host.submit(move || {
                let _no_grad = GradMode::off();
                additions.into_iter().try_for_each(|(mut sum, part)| {
                    let _ = sum.f_add_(&part)?;
                    rooms.give(part);
                    Ok(())
                })
            })?;
            let added = Arc::new(Event::untimed(Device::Cpu)?);
            host.record(&added)?;
            of.arrived.push(added);
        }
        state.leaving.push_back(copied);
        let oldest = if state.leaving.len() > LEAVING { state.leaving.pop_front() } else { None };
        drop(state);
        // A failure of the stream is told at the end of the backward.
        if let Some(oldest) = oldest {
            let _ = oldest.synchronize();
        }
        Ok(())
    }

    /// Takes gradients to the host for one use there, without adding them to any: where the device is the host they are there. They are
    /// when the events are complete.
    pub(crate) fn bring_home(&self, layer: usize, gradients: Gradients) -> Result<Arriving> {
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
            let room = self.0.rooms.take(&gradient, self.0.homing.pinned_for)?;
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

    /// Takes back what [`Engine::bring_home`] gave, after its use.
    pub(crate) fn rooms(&self) -> impl Fn(Tensor) + Send + 'static {
        let (rooms, on_host) = (self.0.rooms.clone(), self.device() == Device::Cpu);
        move |room| {
            // Where the device is the host, it is the gradient itself.
            if !on_host {
                rooms.give(room);
            }
        }
    }

    /// Queues a change of a layer's tensors at home on the host's thread, behind `after` and behind every load that was queued before.
    /// What the slots hold of the layer is old from here on. `ahead` are the tensors that are changed before the rest of the model is.
    /// Returns when the change is done.
    pub(crate) fn update(
        &self,
        layer: usize,
        after: &[Arc<Event>],
        ahead: Vec<usize>,
        work: impl FnOnce() -> runtime::Result<()> + Send + 'static,
    ) -> Result<Arc<Event>> {
        let host = &self.0.host;
        let mut state = self.0.state.lock();
        let read = Arc::new(Event::untimed(self.device())?);
        if self.0.feeder.query()? {
            self.0.prefetch.record(&read)?;
            host.wait(&read)?;
        } else {
            // Loads that are not in the prefetch stream yet are this far behind in the feeder.
            let (prefetch, behind) = (self.0.prefetch.clone(), read.clone());
            self.0.feeder.submit(move || prefetch.record(&behind))?;
            let fed = Event::untimed(Device::Cpu)?;
            self.0.feeder.record(&fed)?;
            host.wait(&fed)?;
            host.submit(move || read.synchronize())?;
        }
        for event in after {
            host.wait(event)?;
        }
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
        of.steps += 1;
        of.ahead.extend(ahead);
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
        let current = Stream::current(self.device())?;
        let begin = self.0.trace.begin(&current)?;
        let copied = || -> runtime::Result<Tensor> {
            self.0.options.at(Point::Store)?;
            let pinned_for = self.0.homing.pinned_for;
            let mut home = device::pinned_empty(&gradient.size(), gradient.kind(), pinned_for)?;
            let _no_grad = GradMode::off();
            home.f_copy_(gradient)?;
            Ok(home)
        };
        let home = copied().map_err(|cause| not_stored(&self.name(layer), cause))?;
        let bytes = (gradient.numel() * gradient.kind().elt_size_in_bytes()) as u64;
        self.0.trace.end(&current, begin, (Lane::Store, number, Direction::Backward), bytes)?;
        Ok(home)
    }
}

impl Layer {
    /// The sum of gradients that a tensor has, and what autograd has added to it since it was last asked for. `.grad` is empty then.
    fn sum(&mut self, index: usize) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let tensor = &self.tensors[index];
        let own = tensor.f_grad()?;
        let own = own.defined().then_some(own);
        if own.is_some() {
            set_grad(tensor, None)?;
        }
        Ok(match &self.pending[index] {
            Some(pending) => (Some(pending.shallow_clone()), own),
            None => {
                self.pending[index] = own.as_ref().map(Tensor::shallow_clone);
                (own, None)
            }
        })
    }

    /// Whether a tensor has any gradient.
    pub(crate) fn has_gradient(&self, index: usize) -> Result<bool> {
        Ok(self.pending[index].is_some() || self.tensors[index].f_grad()?.defined())
    }

    /// Takes the gradient of a tensor, which is at home.
    pub(crate) fn take_gradient(&mut self, index: usize) -> Result<Option<Tensor>> {
        let (sum, other) = self.sum(index)?;
        self.pending[index] = None;
        if let (Some(sum), Some(other)) = (&sum, other) {
            for event in &self.arrived {
                event.synchronize()?;
            }
            let _no_grad = GradMode::off();
            let _ = sum.shallow_clone().f_add_(&other)?;
        }
        Ok(sum)
    }
}

fn not_stored(layer: &str, cause: runtime::Error) -> Error {
    Error::Transfer { what: "storing the gradients", layer: layer.to_owned(), cause: Box::new(cause) }
}
