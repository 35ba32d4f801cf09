//! The slots of all layers, and the thread that reads experts into them.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};
use tch::{Device, Kind, Tensor};

use super::ExpertCounters;
use crate::error::{Error, Result, refused};

/// A layer and an expert of it.
pub(super) type Key = (usize, usize);

/// The experts of a layer, in files.
pub(super) trait StoredExperts: Send + Sync {
    /// Number of experts.
    fn count(&self) -> usize;
    /// Bytes of an expert in a slot.
    fn slot_bytes(&self) -> u64;
    /// Bytes that [`StoredExperts::read`] reads.
    fn read_bytes(&self) -> u64;
    /// Refuses an expert whose values are not the file's any more, or that is to be trained.
    fn check(&self, expert: usize) -> Result<()>;
    /// Reads an expert into a slot.
    fn read(&self, expert: usize, slot: &Tensor) -> Result<()>;
    /// Returns the matrices in a slot.
    fn matrices(&self, slot: &Tensor) -> Result<[Tensor; 3]>;
}

/// The slots of a model.
pub(super) struct Cache {
    shared: Arc<Shared>,
    reader: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    layers: Vec<Box<dyn StoredExperts>>,
    slot_bytes: u64,
    state: Mutex<State>,
    /// A slot was read or released, a request came, or the model is gone.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    /// The slot of each expert that is in one, or is being read into it.
    places: HashMap<Key, usize>,
    /// Experts to be read, with the pass that asked for them.
    requests: VecDeque<(u64, Key)>,
    /// Reads that failed, by the passes that waited for them.
    failed: HashMap<(u64, Key), String>,
    /// Why the reader's thread ended before the model was gone.
    reader_failure: Option<String>,
    passes: u64,
    uses: u64,
    counters: ExpertCounters,
    closed: bool,
}

struct Slot {
    bytes: Tensor,
    holds: Option<Key>,
    is_read: bool,
    /// The passes that are going to use it; a slot with any is not overwritten.
    pins: Vec<u64>,
    /// Number of the last use.
    used: u64,
}

impl Cache {
    /// Creates as many slots as fit into `bytes`, at most one for each expert.
    pub(super) fn new(layers: Vec<Box<dyn StoredExperts>>, bytes: u64) -> Result<Arc<Self>> {
        /// One that is used while another is read.
        const LEAST: u64 = 2;
        let slot_bytes = layers.iter().map(|layer| layer.slot_bytes()).max().unwrap_or(0).max(1);
        let experts: usize = layers.iter().map(|layer| layer.count()).sum();
        let count = (bytes / slot_bytes).min((experts as u64).max(LEAST));
        if count < LEAST {
            let reason = format!(
                "a cache of {bytes} bytes holds {count} experts of {slot_bytes} bytes; give at least {}",
                LEAST * slot_bytes
            );
            return Err(refused("experts", reason));
        }
        let slot = || {
            let bytes = Tensor::f_empty([slot_bytes as i64], (Kind::Uint8, Device::Cpu))?;
            Ok(Slot { bytes, holds: None, is_read: false, pins: Vec::new(), used: 0 })
        };
        let slots = (0..count).map(|_| slot()).collect::<Result<_>>()?;
        let state = Mutex::new(State { slots, ..State::default() });
        let shared = Arc::new(Shared { layers, slot_bytes, state, changed: Condvar::new() });
        let reader = {
            let shared = shared.clone();
            std::thread::Builder::new().name("experts".to_owned()).spawn(move || shared.run())
        };
        let reader =
            reader.map_err(|cause| refused("experts", format!("no thread could be started: {cause}")))?;
        Ok(Arc::new(Self { shared, reader: Mutex::new(Some(reader)) }))
    }

    pub(super) fn counters(&self) -> ExpertCounters {
        self.shared.state.lock().counters
    }

    pub(super) fn slot_bytes(&self) -> u64 {
        self.shared.slot_bytes
    }

    pub(super) fn slots(&self) -> usize {
        self.shared.state.lock().slots.len()
    }

    pub(super) fn experts(&self) -> usize {
        self.shared.layers.iter().map(|layer| layer.count()).sum()
    }

    /// Begins a pass over experts of a layer: pins those that are in slots, and requests the others. Returns the pass' number, and the
    /// experts in the order in which they are to be used, each with its index in `experts`.
    pub(super) fn begin(&self, layer: usize, experts: &[usize]) -> Result<(u64, VecDeque<(usize, Key)>)> {
        experts.iter().try_for_each(|&expert| self.shared.layers[layer].check(expert))?;
        let mut state = self.shared.state.lock();
        state.passes += 1;
        state.counters.requested += experts.len() as u64;
        let pass = state.passes;
        let keys = experts.iter().map(|&expert| (layer, expert)).enumerate();
        let (present, missing): (Vec<_>, Vec<_>) = keys.partition(|(_, key)| state.places.contains_key(key));
        for (_, key) in &present {
            let slot = state.places[key];
            state.slots[slot].pins.push(pass);
        }
        for (_, key) in &missing {
            state.requests.push_back((pass, *key));
        }
        self.shared.changed.notify_all();
        Ok((pass, present.into_iter().chain(missing).collect()))
    }

    /// Waits until an expert that the pass has begun with is in its slot, which the pass pins, and returns its matrices.
    pub(super) fn wait(&self, pass: u64, key: Key) -> Result<[Tensor; 3]> {
        let mut state = self.shared.state.lock();
        let mut since = None;
        loop {
            let reason = state.failed.get(&(pass, key)).or(state.reader_failure.as_ref());
            if let Some(reason) = reason {
                return Err(Error::Other(format!("offload: experts: {reason}").into()));
            }
            if let Some(&slot) = state.places.get(&key)
                && state.slots[slot].is_read
            {
                // Another pass' request brought it before this one's was served.
                if let Some(at) = state.requests.iter().position(|request| *request == (pass, key)) {
                    state.requests.remove(at);
                    state.slots[slot].pins.push(pass);
                }
                if let Some(since) = since {
                    state.counters.waited += Instant::elapsed(&since);
                }
                return self.shared.layers[key.0].matrices(&state.slots[slot].bytes);
            }
            since.get_or_insert_with(Instant::now);
            self.shared.changed.wait(&mut state);
        }
    }

    /// Ends a pass' use of an expert that it waited for.
    pub(super) fn release(&self, pass: u64, key: Key) {
        let mut state = self.shared.state.lock();
        state.unpin(pass, key);
        self.shared.changed.notify_all();
    }

    /// Gives up experts of a pass that were not waited for, or whose read failed.
    pub(super) fn cancel(&self, pass: u64, keys: impl Iterator<Item = Key>) {
        let mut state = self.shared.state.lock();
        for key in keys {
            state.requests.retain(|request| *request != (pass, key));
            state.failed.remove(&(pass, key));
            state.unpin(pass, key);
        }
        self.shared.changed.notify_all();
    }
}

impl State {
    /// Takes a pass' pin from an expert, if it has one: none is left of a read that failed.
    fn unpin(&mut self, pass: u64, key: Key) {
        self.uses += 1;
        if let Some(&slot) = self.places.get(&key) {
            let slot = &mut self.slots[slot];
            slot.pins.retain(|pin| *pin != pass);
            slot.used = self.uses;
        }
    }

    /// Returns the slot without a pin that was used longest ago.
    fn free_slot(&self) -> Option<usize> {
        let free = self.slots.iter().enumerate().filter(|(_, slot)| slot.pins.is_empty());
        free.min_by_key(|(_, slot)| (slot.holds.is_some(), slot.used)).map(|(number, _)| number)
    }
}

impl Shared {
    /// The reader's thread. Who waits for it learns of a panic.
    fn run(&self) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.read_requests())) {
            self.state.lock().reader_failure = Some(described(&*panic));
            self.changed.notify_all();
        }
    }

    /// Reads one request after the other into the next free slot.
    fn read_requests(&self) {
        let mut state = self.state.lock();
        loop {
            if state.closed {
                return;
            }
            let Some(&(pass, key)) = state.requests.front() else {
                self.changed.wait(&mut state);
                continue;
            };
            // Another pass may have asked for it before.
            if let Some(&slot) = state.places.get(&key) {
                state.slots[slot].pins.push(pass);
                state.requests.pop_front();
                self.changed.notify_all();
                continue;
            }
            let Some(slot) = state.free_slot() else {
                self.changed.wait(&mut state);
                continue;
            };
            state.requests.pop_front();
            self.read(&mut state, (pass, key), slot);
        }
    }

    fn read(&self, state: &mut MutexGuard<'_, State>, (pass, key): (u64, Key), slot: usize) {
        if let Some(old) = state.slots[slot].holds.replace(key) {
            state.places.remove(&old);
        }
        state.places.insert(key, slot);
        (state.slots[slot].is_read, state.slots[slot].pins) = (false, vec![pass]);
        let bytes = state.slots[slot].bytes.shallow_clone();
        let (layer, expert) = key;
        let read = || {
            catch_unwind(AssertUnwindSafe(|| self.layers[layer].read(expert, &bytes)))
                .unwrap_or_else(|panic| Err(refused("experts", described(&*panic))))
        };
        let result = MutexGuard::unlocked(state, read);
        match result {
            Ok(()) => {
                state.slots[slot].is_read = true;
                state.counters.loads += 1;
                state.counters.loaded += self.layers[layer].read_bytes();
            }
            Err(error) => {
                state.places.remove(&key);
                state.slots[slot].holds = None;
                // Also those that began with it while it was read. Others ask again.
                for pass in std::mem::take(&mut state.slots[slot].pins) {
                    state.failed.insert((pass, key), error.to_string());
                }
            }
        }
        self.changed.notify_all();
    }
}

/// Describes a panic of the reader's thread.
fn described(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text =
        text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message");
    format!("the thread that reads experts panicked: {text}; this is a fault of the program")
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.changed.notify_all();
        if let Some(reader) = self.reader.lock().take() {
            let _ = reader.join();
        }
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").field("slots", &self.slots()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
