//! The ring of slots: prefetching and using layers.

use std::sync::Arc;

use runtime::device::{self, Event, Stream};
use runtime::memory::{Attached, MovableMemory};
use tch::{Device, Kind, Tensor};

use super::{Counters, Engine, State, Use};
use crate::error::{Error, Result, refused, transfer};
use crate::layout::piece;
use crate::occupancy::{Occupancy, OccupancyGuard};
use crate::options::HookPoint;
use crate::schedule::{Access, Direction, Load, Ring};
use crate::storage::{Layer, Piece};
use crate::trace::StreamKind;

pub(super) struct Slots {
    pub(super) ring: Ring,
    pub(super) slots: Vec<Slot>,
    /// Its address tells this ring from the one after it.
    identity: Arc<()>,
}

pub(super) struct Slot {
    pub(super) bytes: Tensor,
    /// Pinned memory for values from a file, if the device is not the CPU.
    staging: Option<Tensor>,
    /// When the host has read the file and queued the copy; a CPU event.
    pub(super) staged: Arc<Event>,
    /// When the layer is loaded.
    pub(super) ready: Arc<Event>,
    /// When the uses since the last load are over, each on its own stream.
    free: Vec<Arc<Event>>,
    occupancy: Occupancy,
    /// The contents of the slot, once the load is queued.
    pub(super) holds: Option<Holds>,
}

/// The contents of a slot.
pub(super) struct Holds {
    pub(super) layer: usize,
    /// The layer's generation when the load was queued.
    generation: u64,
    versions: Vec<i64>,
}

impl Slot {
    /// Whether the contents are the layer's current values.
    fn is_current(&self, (number, layer): (usize, &Layer)) -> bool {
        let now = |holds: &Holds| {
            holds.layer == number
                && holds.generation == layer.generation
                && holds.versions == layer.versions()
        };
        self.holds.as_ref().is_some_and(now) && layer.is_as_seen()
    }
}

impl Engine {
    /// Starts a use of a layer in the ring, and prefetches the next ones.
    pub(crate) fn acquire(&self, layer: usize, direction: Direction) -> Result<Lease> {
        // Dropped after the lock, which its end takes.
        let lease;
        let begun = {
            let mut state = self.0.state.lock();
            state.layers[layer].look(self.0.placement.pinned_for)?;
            self.ensure_ring(&mut state)?;
            let State { layers, ring, .. } = &mut *state;
            let Slots { ring, slots, identity } = ring.as_mut().expect("the ring was just created");
            let is_current = |slot: usize, layer: usize| slots[slot].is_current((layer, &layers[layer]));
            let access = Access { layer, direction };
            let Some((slot, load)) = ring.acquire(access, &is_current) else {
                let reason = format!(
                    "all {} slots are in use, and `{}` needs one; use a larger ring, or run backward before the next forward",
                    slots.len(),
                    layers[layer].name
                );
                return Err(refused("ring", reason));
            };
            // From here on the end of the use is counted in any case.
            lease = Lease {
                engine: self.clone(),
                ring: identity.clone(),
                slot,
                memory: layers[layer].memory(&slots[slot].bytes),
                leaves: Vec::new(),
                inside: None,
                ended: false,
                _use: Use::begin(self, &mut state),
            };
            self.begin_use(&mut state, (slot, load), access)
        };
        let arrived = begun.and_then(|StartedUse { views, staged, ready, occupancy }| {
            let wait = || {
                self.0.options.at(HookPoint::Event)?;
                staged.synchronize()?;
                Stream::current(self.device())?.wait(&ready)?;
                (self.device() == Device::Cpu).then(|| occupancy.read()).transpose()
            };
            let inside = wait().map_err(|error| transfer("loading", &self.name(layer), error))?;
            Ok((views, inside))
        });
        match arrived {
            Ok((views, inside)) => {
                let mut lease = lease;
                lease.inside = inside;
                lease.leaves = self.leaves(layer, &views)?;
                Ok(lease)
            }
            Err(error) => {
                drop(lease);
                self.recover();
                Err(error)
            }
        }
    }

    /// Queues the loads of a use and of those that follow.
    fn begin_use(
        &self,
        state: &mut State,
        (slot, load): (usize, bool),
        access: Access,
    ) -> Result<StartedUse> {
        let State { layers, ring, counters, .. } = &mut *state;
        let Slots { ring, slots, .. } = ring.as_mut().expect("the ring has this slot");
        let Access { layer, direction } = access;
        if load {
            counters.late += 1;
            counters.loads += 1;
            counters.loaded += layers[layer].bytes();
            self.load(&mut slots[slot], (layer, &layers[layer]), direction)?;
        }
        let is_current = |slot: usize, layer: usize| slots[slot].is_current((layer, &layers[layer]));
        // Trained layers are not prefetched across the end of a step, when an external optimizer may write them; the engine
        // waits for its own optimizer.
        let may_load = |now: Access, coming: Access| {
            let crosses = coming.direction == Direction::Forward
                && (now.direction == Direction::Backward || coming.layer <= now.layer);
            !crosses || layers[coming.layer].update_queued || !layers[coming.layer].is_trained()
        };
        let ahead = ring.prefetch(&is_current, &may_load);
        self.load_ahead(layers, slots, counters, &ahead, direction)?;
        let views = layers[layer].layout.views(&layers[layer].memory(&slots[slot].bytes))?;
        let Slot { staged, ready, occupancy, .. } = &slots[slot];
        Ok(StartedUse { views, staged: staged.clone(), ready: ready.clone(), occupancy: occupancy.clone() })
    }

    /// Prefetches the next layers, after the engine's optimizer has queued its updates.
    pub(crate) fn send_ahead(&self) -> Result<()> {
        let mut state = self.0.state.lock();
        let State { layers, ring, counters, .. } = &mut *state;
        let Some(Slots { ring, slots, .. }) = ring else { return Ok(()) };
        let is_current = |slot: usize, layer: usize| slots[slot].is_current((layer, &layers[layer]));
        let ahead = ring.prefetch(&is_current, &|_, coming| layers[coming.layer].update_queued);
        let queued = self.load_ahead(layers, slots, counters, &ahead, Direction::Forward);
        drop(state);
        queued.inspect_err(|_| self.recover())
    }

    fn load_ahead(
        &self,
        layers: &mut [Layer],
        slots: &mut [Slot],
        counters: &mut Counters,
        ahead: &[Load],
        direction: Direction,
    ) -> Result<()> {
        for &Load { slot, layer } in ahead {
            // An invalid layer is an error of its own use; until then the slot is empty.
            if layers[layer].look(self.0.placement.pinned_for).is_err() {
                slots[slot].holds = None;
                continue;
            }
            counters.loads += 1;
            counters.loaded += layers[layer].bytes();
            self.load(&mut slots[slot], (layer, &layers[layer]), direction)?;
        }
        Ok(())
    }

    /// Queues the load of a layer into a slot.
    fn load(&self, slot: &mut Slot, (number, layer): (usize, &Layer), direction: Direction) -> Result<()> {
        slot.holds = None;
        self.queue(slot, layer, direction).map_err(|error| match error {
            error @ Error::Invalid(_) => error,
            cause => transfer("loading", &layer.name, cause),
        })?;
        slot.free.clear();
        slot.holds = Some(Holds { layer: number, generation: layer.generation, versions: layer.versions() });
        Ok(())
    }

    fn queue(&self, slot: &mut Slot, layer: &Layer, direction: Direction) -> Result<()> {
        let (prefetch, feeder) = (&self.0.prefetch, &self.0.feeder);
        self.0.options.at(HookPoint::Queue)?;
        let pieces = layer.pieces(&slot.bytes)?;
        let (options, occupancy) = (self.0.options.clone(), slot.occupancy.clone());
        let on_host = self.device() == Device::Cpu;
        let what = (StreamKind::Load, layer.number, direction);
        let updated = layer.updated.clone();
        let pending = updated.as_ref().map_or(Ok(false), |updated| Ok::<_, Error>(!updated.query()?))?;
        // A host stream waits in its own thread. Waiting for a GPU stream would block this thread, which holds the lock. Loads
        // stay behind earlier ones in the feeder, because slots are written in the order of the decisions.
        if on_host || !(pending || layer.is_in_files() || !feeder.query()?) {
            for event in slot.free.iter().chain(&updated) {
                prefetch.wait(event)?;
            }
            let begin = self.0.trace.begin(prefetch)?;
            prefetch.submit(move || {
                options.at(HookPoint::Load)?;
                let _alone = on_host.then(|| occupancy.write()).transpose()?;
                pieces.into_iter().try_for_each(|(piece, mut target)| piece.bring(&mut target, None))
            })?;
            self.0.trace.end(prefetch, begin, what, layer.bytes())?;
            prefetch.record(&slot.ready)?;
            return Ok(());
        }
        let staging = match &slot.staging {
            _ if !layer.is_in_files() => None,
            Some(staging) => Some(staging.shallow_clone()),
            None => {
                let made = device::pinned_empty(&slot.bytes.size(), Kind::Uint8, self.device())?;
                Some(slot.staging.insert(made).shallow_clone())
            }
        };
        let (stream, ready, origin) = (prefetch.clone(), slot.ready.clone(), slot.bytes.data_ptr() as usize);
        let (free, trace, bytes) = (slot.free.clone(), self.0.trace.clone(), layer.bytes());
        // The staging memory is read until then.
        feeder.wait(&slot.ready)?;
        updated.iter().try_for_each(|updated| feeder.wait(updated))?;
        feeder.submit(move || {
            options.at(HookPoint::Load)?;
            free.iter().try_for_each(|event| stream.wait(event))?;
            let begin = trace.begin(&stream)?;
            for (piece, mut target) in pieces {
                let from = (target.data_ptr() as usize - origin) as i64;
                let staging = match (&piece, &staging) {
                    (Piece::File(_), Some(staging)) => Some(staging.f_narrow(0, from, target.size()[0])?),
                    _ => None,
                };
                stream.submit(move || piece.bring(&mut target, staging.as_ref()))?;
            }
            trace.end(&stream, begin, what, bytes)?;
            stream.record(&ready)
        })?;
        feeder.record(&slot.staged)?;
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
            let bytes = Tensor::f_empty([bytes as i64], (Kind::Uint8, device))
                .map_err(|error| transfer("allocating memory", "a slot of the ring", error.into()))?;
            // On CUDA the memory may belong to another tensor whose kernels have not run yet.
            let free = Event::untimed(device)?;
            Stream::current(device)?.record(&free)?;
            Ok(Slot {
                bytes,
                staging: None,
                staged: Arc::new(Event::untimed(Device::Cpu)?),
                ready: Arc::new(Event::untimed(device)?),
                free: vec![Arc::new(free)],
                occupancy: Occupancy::default(),
                holds: None,
            })
        };
        let memory = (0..slots).map(slot).collect::<Result<Vec<_>>>()?;
        let ring = Ring::new(slots, state.layers.len());
        state.ring = Some(Slots { ring, slots: memory, identity: Arc::default() });
        Ok(())
    }
}

/// A use whose loads are queued.
struct StartedUse {
    views: Vec<Tensor>,
    staged: Arc<Event>,
    ready: Arc<Event>,
    occupancy: Occupancy,
}

/// A layer in a slot, for one use.
#[derive(Debug)]
pub(crate) struct Lease {
    engine: Engine,
    /// The identity of the ring of the slot: a lease may end after its ring.
    ring: Arc<()>,
    slot: usize,
    /// The slot's bytes, beginning with the layer's, or the layer's own where it stays.
    memory: Tensor,
    pub(crate) leaves: Vec<Tensor>,
    inside: Option<OccupancyGuard>,
    ended: bool,
    _use: Use,
}

impl Lease {
    /// Lets tensors of the layer use the slot's memory until the guard is dropped.
    pub(crate) fn attach<'a>(&self, tensors: &'a MovableMemory) -> Result<Attached<'a>> {
        tensors.attach(&piece(&self.memory, 0..tensors.bytes().numel())?)
    }

    /// Records the end of the use on the computing stream. Each stream has its own event.
    fn end(&mut self) -> Result<Option<Event>> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(None);
        }
        self.inside = None;
        self.engine.0.options.at(HookPoint::Event)?;
        let free = Event::untimed(self.engine.device())?;
        Stream::current(self.engine.device())?.record(&free)?;
        Ok(Some(free))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // If this fails on a device, the next use fails too.
        let free = self.end().ok().flatten();
        let mut state = self.engine.0.state.lock();
        if let Some(Slots { ring, slots, identity }) = &mut state.ring
            && Arc::ptr_eq(identity, &self.ring)
        {
            ring.release(self.slot);
            let events = &mut slots[self.slot].free;
            // A layer that stays in its slot can be used any number of times.
            events.retain(|event| !event.query().unwrap_or(true));
            events.extend(free.map(Arc::new));
        }
    }
}

#[cfg(test)]
mod tests {
    use models::module::Role;
    use tch::kind;

    use super::*;
    use crate::options::OffloadConfig;

    #[test]
    fn a_lease_that_ends_after_its_ring_leaves_the_next_ring_alone() {
        let engine = Engine::new(OffloadConfig { ring: 1, ..OffloadConfig::default() }).unwrap();
        for number in 0..2 {
            let weight = Tensor::ones([4], kind::FLOAT_CPU);
            let named = [("weight".to_owned(), weight, Role::Parameter)];
            engine.add((&format!("layers.{number}"), number), &named, &|_| None).unwrap();
        }
        let before = engine.acquire(0, Direction::Forward).unwrap();
        engine.release_ring().unwrap();
        let _used = engine.acquire(1, Direction::Forward).unwrap();
        drop(before);
        let error = engine.acquire(0, Direction::Forward).unwrap_err().to_string();
        assert!(error.contains("all 1 slots are in use"), "{error}");
    }
}
