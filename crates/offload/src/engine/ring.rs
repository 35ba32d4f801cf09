//! Layers in slots: loads ahead of time, and uses.

use std::sync::Arc;

use runtime::device::{self, Event, Stream};
use tch::{Device, Kind, Tensor};

use super::{Engine, State};
use crate::error::{Error, Result};
use crate::home::Layer;
use crate::occupancy::{Inside, Occupancy};
use crate::options::Point;
use crate::schedule::{Access, Direction, Ring};
use crate::trace::Lane;

pub(super) struct Slots {
    pub(super) ring: Ring,
    pub(super) slots: Vec<Slot>,
}

pub(super) struct Slot {
    pub(super) bytes: Tensor,
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
    pub(super) holds: Option<(u64, Vec<i64>)>,
}

impl Slot {
    /// Whether what it holds is what the layer is now.
    fn is_current(&self, layer: &Layer) -> bool {
        let now = |holds: &(u64, Vec<i64>)| holds.0 == layer.generation && holds.1 == layer.versions();
        self.holds.as_ref().is_some_and(now)
    }
}

impl Engine {
    /// Begins a use of a layer in the ring, and sends for those that come next.
    pub(crate) fn acquire(&self, layer: usize, direction: Direction) -> Result<Lease> {
        let (slot, views, staged, ready, free, occupancy) = {
            let mut state = self.0.state.lock();
            self.ensure_ring(&mut state)?;
            let State { layers, ring, counters, uses, .. } = &mut *state;
            layers[layer].check()?;
            let Slots { ring, slots } = ring.as_mut().expect("it was just made");
            let is_current = |slot: usize, layer: usize| slots[slot].is_current(&layers[layer]);
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
        let is_current = |slot: usize, layer: usize| slots[slot].is_current(&layers[layer]);
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
            let bytes = Tensor::f_empty([bytes as i64], (Kind::Uint8, device))
                .map_err(|error| self.refused("making room", "a slot of the ring", error.into()))?;
            // On CUDA the memory may have been another tensor's until now, whose kernels have not run.
            let free = Event::untimed(device)?;
            Stream::current(device)?.record(&free)?;
            Ok(Slot {
                bytes,
                staging: None,
                staged: Arc::new(Event::untimed(Device::Cpu)?),
                ready: Arc::new(Event::untimed(device)?),
                free: Arc::new(free),
                occupancy: Occupancy::default(),
                holds: None,
            })
        };
        let memory = (0..slots).map(slot).collect::<Result<Vec<_>>>()?;
        state.ring = Some(Slots { ring: Ring::new(slots, state.layers.len()), slots: memory });
        Ok(())
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
