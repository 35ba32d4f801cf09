//! Transfers of layers and gradients.
//!
//! ```text
//!            prefetch stream                      compute                       store stream        host thread
//! host ──► wait free[s] · copy · record ready[s] ──► wait ready[s] · run · record free[s]
//!                                                        gradients ──────────► copy to host ──► add up, or step
//! ```
//!
//! A second host thread, the feeder, waits on the host for what a GPU stream cannot wait for (reading a file, a layer's step),
//! and then queues the load, so that a use of one layer does not wait for another's.
//!
//! A slot is device memory for one layer. Each use holds a lease; a slot without one is given to the layer that is needed next
//! ([`schedule`](crate::schedule)). The tensors that a layer runs with are views of its slot, created for one use: they share
//! the slot's version, so that a graph which outlives its lease is refused once the slot has been overwritten.

mod fetch;
mod gradients;
mod graph;
mod host_queue;
mod pass;
mod pinned_pool;
mod ring;
mod segment_backward;
mod transfer;

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use models::module::Role;
use models::tensors_file::TensorLocation;
use parking_lot::{Mutex, MutexGuard};
use runtime::device::{self, Event, Stream};
use runtime::precision::identity;
use tch::{Device, Tensor};
use training::activations::{HostOffload, LayerStorage};

use crate::error::{Result, refused};
use crate::options::{HookPoint, OffloadConfig};
use crate::schedule::Direction;
use crate::storage::{FileLocation, Layer, Placement, own_folder};
use crate::trace::{Span, StreamKind, Trace};
pub(crate) use fetch::Fetched;
use fetch::Use;
pub(crate) use gradients::GradientConsumer;
pub(crate) use graph::Outstanding;
use pass::EndRequest;
use pinned_pool::PinnedPool;
pub(crate) use ring::Lease;
use ring::Slots;
pub(crate) use segment_backward::SegmentBackward;
pub(crate) use transfer::Transferred;

/// A handle on the engine of a model.
#[derive(Clone)]
pub(crate) struct Engine(Arc<Inner>);

struct Inner {
    options: OffloadConfig,
    placement: Placement,
    prefetch: Stream,
    store: Stream,
    /// A host thread that adds gradients and runs the optimizer.
    host: Stream,
    /// A host thread that queues loads which wait for something on the host.
    feeder: Stream,
    trace: Arc<Trace>,
    pool: PinnedPool,
    /// The inputs of layers in host memory, if they are there between forward and backward.
    inputs: Option<HostOffload>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    layers: Vec<Layer>,
    ring: Option<Slots>,
    consumer: Option<Arc<dyn GradientConsumer>>,
    /// When the gradients of the last layers have left the device.
    stores_in_flight: VecDeque<Arc<Event>>,
    /// The running backwards: one entry for each layer that takes part.
    end_requests: Vec<Weak<EndRequest>>,
    /// A failure of an optimizer step on the host that was not reported yet.
    unreported: Option<runtime::Error>,
    /// Whether an update on the host has failed since the weights were loaded.
    update_failed: bool,
    /// Uses in progress, inside and outside the ring, by thread.
    uses: HashMap<ThreadId, usize>,
    /// When copies from the host on callers' streams are done.
    reads: Vec<Event>,
    counters: Counters,
}

/// Bytes and loads since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes copied to the device.
    pub loaded: u64,
    /// Bytes copied to the host.
    pub stored: u64,
    /// Number of loads.
    pub loads: u64,
    /// Loads that started only when the layer was needed.
    pub late: u64,
}

impl Engine {
    /// Creates an engine without layers.
    pub(crate) fn new(options: OffloadConfig) -> Result<Self> {
        options.check()?;
        let device = options.device;
        let folder = match &options.tier {
            crate::Tier::Host => None,
            crate::Tier::File(folder) => {
                // Fails before the first layer if the folder is not writable.
                own_folder(folder)?;
                Some(folder.clone())
            }
        };
        let placement = Placement {
            pinned_for: if options.pinned { device } else { Device::Cpu },
            folder,
            source: options.source.clone(),
        };
        let store = Stream::high_priority(device)?;
        Ok(Self(Arc::new(Inner {
            placement,
            prefetch: Stream::high_priority(device)?,
            inputs: options.inputs_on_host.then(|| HostOffload::on(store.clone())),
            store,
            host: Stream::new(Device::Cpu)?,
            feeder: Stream::new(Device::Cpu)?,
            trace: Arc::default(),
            pool: PinnedPool::default(),
            state: Mutex::default(),
            options,
        })))
    }

    pub(crate) fn options(&self) -> &OffloadConfig {
        &self.0.options
    }

    /// Returns the storage of the input of block `number` outside the device; `None` where inputs stay on it.
    pub(crate) fn input_storage(&self, number: usize) -> Option<LayerStorage> {
        self.0.inputs.as_ref().map(|inputs| inputs.storage(number))
    }

    /// Returns the bytes of inputs in host memory.
    pub(crate) fn input_bytes(&self) -> u64 {
        self.0.inputs.as_ref().map_or(0, HostOffload::bytes)
    }

    pub(crate) fn device(&self) -> Device {
        self.0.options.device
    }

    pub(crate) fn placement(&self) -> &Placement {
        &self.0.placement
    }

    /// Offloads a layer. Returns its index.
    pub(crate) fn add(
        &self,
        (name, number): (&str, usize),
        named: &[(String, Tensor, Role)],
        stored: &dyn Fn(&str) -> Option<TensorLocation>,
    ) -> Result<usize> {
        let left = |name: &str, _: &Tensor| stored(name).map(FileLocation::InModel);
        let layer = Layer::new((name, number), named, &self.0.placement, &left, None)?;
        self.release_ring()?;
        let mut state = self.0.state.lock();
        state.layers.push(layer);
        Ok(state.layers.len() - 1)
    }

    /// Offloads a layer again after its tensors were replaced. If that fails, the layer cannot be used any more.
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
            if old.is_in_source() {
                let reason = format!(
                    "the tensors of `{}` were replaced, but its values are in shards; install adapters before the model is divided",
                    old.name
                );
                return Err(refused("layers", reason));
            }
        }
        // The layer changes whatever failed before; the failure is reported to the next caller.
        let _ = self.wait_and_recover();
        let mut state = self.0.state.lock();
        let old = &state.layers[layer];
        let placement = Placement { folder: None, source: None, ..self.0.placement.clone() };
        let left = |name: &str, tensor: &Tensor| old.left(name, tensor);
        let new = Layer::new((&old.name, old.number), named, &placement, &left, Some(old));
        let result = match new {
            Ok(mut new) => {
                // Slots with the old layer are never used for the new one.
                (new.generation, new.steps) = (old.generation + 1, old.steps);
                new.keep_versions(old)?;
                new.updated_early.clone_from(&old.updated_early);
                new.outstanding = old.outstanding.clone();
                state.layers[layer] = new;
                Ok(())
            }
            Err(error) => {
                let reason = format!("`{}` could not be offloaded after it was changed: {error}", old.name);
                state.layers[layer].lost = Some(reason);
                Err(error)
            }
        };
        drop(state);
        result.and(self.release_ring())
    }

    /// Runs `body` on the layers, with the lock block.
    pub(crate) fn with_layers<R>(&self, body: impl FnOnce(&mut Vec<Layer>) -> R) -> R {
        body(&mut self.0.state.lock().layers)
    }

    /// Returns whether a tensor of the layer is another layer's too.
    pub(crate) fn shares(&self, layer: usize) -> Result<bool> {
        let state = self.0.state.lock();
        let identities =
            |layer: &Layer| layer.tensors.iter().map(identity).collect::<Result<HashSet<_>, _>>();
        let tensors = identities(&state.layers[layer])?;
        for (_, other) in state.layers.iter().enumerate().filter(|(number, _)| *number != layer) {
            if !tensors.is_disjoint(&identities(other)?) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(crate) fn set_consumer(&self, consumer: Arc<dyn GradientConsumer>) -> Result<()> {
        let mut state = self.0.state.lock();
        if state.consumer.is_some() {
            let reason =
                "these layers already have a `HostAdamW`, which consumes their gradients; drop it first";
            return Err(refused("optimizer", reason));
        }
        state.consumer = Some(consumer);
        Ok(())
    }

    pub(crate) fn remove_consumer(&self) {
        let mut state = self.0.state.lock();
        state.consumer = None;
        state.layers.iter_mut().for_each(|layer| layer.updated_early.clear());
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

    /// Waits for all transfers, and for all work that reads or writes the layers' host memory.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let update_queued = self.wait_and_recover();
        match self.0.state.lock().unreported.take() {
            Some(error) => Err(error),
            None => update_queued,
        }
    }

    /// Returns whether an update on the host has failed, so that weights are neither old nor new; reports a failure no more.
    pub(crate) fn update_has_failed(&self) -> bool {
        // Its error, if any, is the one that is being handled.
        let _ = self.synchronize();
        self.0.state.lock().update_failed
    }

    /// Forgets that an update has failed: weights and state are being loaded.
    pub(crate) fn forget_failed_update(&self) {
        let _ = self.synchronize();
        self.0.state.lock().update_failed = false;
    }

    /// Waits for the streams, and makes them usable again after a failure. Returns a failed load. A failed store of gradients
    /// discards all gradients in flight, and fails every running backward. A failed step is stored for the next caller.
    fn wait_and_recover(&self) -> Result<()> {
        self.recover_locked(&mut self.0.state.lock())
    }

    fn recover_locked(&self, state: &mut MutexGuard<'_, State>) -> Result<()> {
        // The feeder waits for the host thread, and the prefetch stream for the feeder's loads.
        let (store, host) = (self.0.store.synchronize(), self.0.host.synchronize());
        let (feeder, prefetch) = (self.0.feeder.synchronize(), self.0.prefetch.synchronize());
        let reads = state.reads.drain(..).map(|event| event.synchronize()).fold(Ok(()), Result::and);
        for (failed, is_step) in [(store, false), (host, state.consumer.is_some())] {
            let Err(error) = failed else { continue };
            Self::discard_gradients(state, &error.to_string());
            if is_step {
                state.unreported.get_or_insert(error);
                state.update_failed = true;
            }
        }
        feeder.and(prefetch).and(reads)
    }

    /// Returns the device bytes of the ring.
    pub(crate) fn ring_bytes(&self) -> u64 {
        let state = self.0.state.lock();
        state.ring.as_ref().map_or(0, |ring| ring.slots.iter().map(|slot| slot.bytes.numel() as u64).sum())
    }

    /// Frees the ring's memory; the next use allocates it again.
    pub(crate) fn release_ring(&self) -> Result<()> {
        if self.0.state.lock().ring.is_none() {
            return Ok(());
        }
        self.synchronize()?;
        device::synchronize(self.device())?;
        self.0.state.lock().ring = None;
        Ok(())
    }

    /// Checks that all layers are on the host: the assignment's `test_model_on_cpu`.
    pub(crate) fn check_on_host(&self) -> Result<()> {
        let state = self.0.state.lock();
        let in_ring = state.ring.as_ref().is_some_and(|ring| ring.ring.in_use());
        Self::check_not_in_use(in_ring || state.uses.values().any(|&uses| uses > 0))?;
        Self::check_none_misplaced(&state)
    }

    fn check_not_in_use(in_use: bool) -> Result<()> {
        if in_use {
            return Err(refused(
                "layers",
                "a layer is in use; expected all layers on the host between passes",
            ));
        }
        Ok(())
    }

    fn check_none_misplaced(state: &State) -> Result<()> {
        match state.layers.iter().find_map(Layer::misplaced) {
            Some(reason) => Err(refused("layers", reason)),
            None => Ok(()),
        }
    }

    /// Records a compute span of block `number`.
    pub(crate) fn computing<R>(
        &self,
        number: usize,
        direction: Direction,
        body: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        self.0.options.at(HookPoint::Compute)?;
        let current = Stream::current(self.device())?;
        let begin = self.0.trace.begin(&current)?;
        let result = body()?;
        self.0.trace.end(&current, begin, (StreamKind::Compute, number, direction), 0)?;
        Ok(result)
    }

    /// Returns a span for the backward of a recomputed segment of block `number`, which autograd runs; `None` while not recording.
    pub(crate) fn segment_backward(&self, number: usize) -> Option<SegmentBackward> {
        self.0.trace.is_recording().then(|| SegmentBackward::new(self.clone(), number))
    }

    /// Makes the streams usable again after a failure that was already reported. The contents of the slots are unknown.
    fn recover(&self) {
        let _ = self.wait_and_recover();
        let mut state = self.0.state.lock();
        if let Some(Slots { ring, slots, .. }) = &mut state.ring {
            ring.clear();
            slots.iter_mut().for_each(|slot| slot.holds = None);
        }
    }

    fn name(&self, layer: usize) -> String {
        self.0.state.lock().layers[layer].name.clone()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The ring's memory is freed, so transfers into it must be done. Whoever waits for a failed one gets the error.
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
