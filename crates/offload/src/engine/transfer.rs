//! Copies of gradients to host memory: into the model's sums, or for one use by an optimizer on the host.

use std::sync::Arc;

use runtime::autograd::GradMode;
use runtime::device::{self, Event, Stream};
use runtime::file_memory;
use tch::{Device, Tensor};

use super::{Engine, State};
use crate::error::{Error, Result, transfer};
use crate::options::HookPoint;
use crate::schedule::Direction;
use crate::storage::Gradients;
use crate::trace::StreamKind;

/// Gradients in host memory, and the events that mark their arrival.
pub(crate) type Transferred = (Gradients, Vec<Arc<Event>>);

/// Maximum number of layers whose gradients are in flight. They occupy device memory, so backward waits for the store stream
/// beyond this.
const MAX_STORES_IN_FLIGHT: usize = 2;

impl Engine {
    /// Adds gradients to the host sums of the model's own tensors. The sums are complete when the stream's work is done, and
    /// become `.grad` when the backward ends. Until then autograd does not see them: a weight that is also used outside its
    /// layer can get a gradient from autograd at any time.
    pub(crate) fn accumulate(&self, layer: usize, gradients: Gradients) -> Result<()> {
        let current = Stream::current(self.device())?;
        let computed = Event::untimed(self.device())?;
        current.record(&computed)?;
        let (store, host) = (&self.0.store, &self.0.host);
        store.wait(&computed)?;
        let mut state = self.0.state.lock();
        let State { layers, counters, .. } = &mut *state;
        let target_layer = &mut layers[layer];
        let mut work = Vec::new();
        for (index, gradient) in gradients {
            counters.stored += (gradient.numel() * gradient.kind().elt_size_in_bytes()) as u64;
            match target_layer.sum(index)? {
                (Some(sum), other) => {
                    work.extend(other.map(|other| (sum.shallow_clone(), other, true)));
                    work.push((sum, gradient, true));
                }
                (None, _) => {
                    let buffer = target_layer.gradient_buffer(index, &self.0.placement)?;
                    target_layer.pending[index] = Some(buffer.shallow_clone());
                    work.push((buffer, gradient, false));
                }
            }
        }
        let bytes = target_layer.gradient_bytes();
        let begin = self.0.trace.begin(store)?;
        let (mut additions, on_host) = (Vec::new(), self.device() == Device::Cpu);
        let mut copies = Vec::new();
        for (target, gradient, adds) in work {
            device::record_stream(&gradient, store)?;
            if adds && !on_host {
                let staging = self.0.pool.take(&gradient, self.0.placement.pinned_for)?;
                copies.push((staging.shallow_clone(), gradient, false));
                additions.push((target, staging));
            } else {
                copies.push((target, gradient, adds));
            }
        }
        let (options, name) = (self.0.options.clone(), target_layer.name.clone());
        store.submit(move || {
            let stored = || {
                options.at(HookPoint::Store)?;
                let _no_grad = GradMode::off();
                for (mut target, gradient, adds) in copies {
                    file_memory::fetch(&target)?;
                    if adds {
                        let _ = target.f_add_(&gradient)?;
                    } else if on_host && gradient.is_contiguous() {
                        device::copy_on_this_thread(&target, &gradient)?;
                    } else {
                        device::copy_async(&mut target, &gradient)?;
                    }
                    file_memory::release(&target)?;
                }
                Ok(())
            };
            stored().map_err(|cause| not_stored(&name, cause))
        })?;
        self.0.trace.end(
            store,
            begin,
            (StreamKind::Store, target_layer.number, Direction::Backward),
            bytes,
        )?;
        let copied = Arc::new(Event::untimed(self.device())?);
        store.record(&copied)?;
        target_layer.arrived = vec![copied.clone()];
        if !additions.is_empty() {
            host.wait(&copied)?;
            let pool = self.0.pool.clone();
            host.submit(move || {
                let _no_grad = GradMode::off();
                additions.into_iter().try_for_each(|(mut sum, part)| {
                    let _ = sum.f_add_(&part)?;
                    pool.give(part);
                    file_memory::release(&sum)
                })
            })?;
            let added = Arc::new(Event::untimed(Device::Cpu)?);
            host.record(&added)?;
            target_layer.arrived.push(added);
        }
        state.stores_in_flight.push_back(copied);
        let oldest = if state.stores_in_flight.len() > MAX_STORES_IN_FLIGHT {
            state.stores_in_flight.pop_front()
        } else {
            None
        };
        drop(state);
        // A failure of the stream is reported at the end of the backward.
        if let Some(oldest) = oldest {
            let _ = oldest.synchronize();
        }
        Ok(())
    }

    /// Copies gradients to the host for one use, without adding them to sums; if the device is the CPU they are already there.
    /// They are complete when the events are.
    pub(crate) fn transfer(&self, layer: usize, gradients: Gradients) -> Result<Transferred> {
        let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        let total = gradients.iter().map(|(_, gradient)| bytes(gradient)).sum::<u64>();
        let number = {
            let mut state = self.0.state.lock();
            state.counters.stored += total;
            state.layers[layer].number
        };
        let computed = Arc::new(Event::untimed(self.device())?);
        Stream::current(self.device())?.record(&computed)?;
        self.0.options.at(HookPoint::Store)?;
        if self.device() == Device::Cpu {
            return Ok((gradients, vec![computed]));
        }
        let store = &self.0.store;
        store.wait(&computed)?;
        let begin = self.0.trace.begin(store)?;
        let mut on_host_now = Vec::new();
        for (index, gradient) in gradients {
            device::record_stream(&gradient, store)?;
            let buffer = self.0.pool.take(&gradient, self.0.placement.pinned_for)?;
            let mut target = buffer.shallow_clone();
            store.submit(move || {
                let _no_grad = GradMode::off();
                device::copy_async(&mut target, &gradient)
            })?;
            on_host_now.push((index, buffer));
        }
        self.0.trace.end(store, begin, (StreamKind::Store, number, Direction::Backward), total)?;
        let copied = Arc::new(Event::untimed(self.device())?);
        store.record(&copied)?;
        Ok((on_host_now, vec![copied]))
    }

    /// Returns a function that puts buffers of [`Engine::transfer`] back into the pool.
    pub(crate) fn pool_return(&self) -> impl Fn(Tensor) + Send + 'static {
        let (pool, on_host) = (self.0.pool.clone(), self.device() == Device::Cpu);
        move |buffer| {
            // If the device is the CPU, the buffer is the gradient itself.
            if !on_host {
                pool.give(buffer);
            }
        }
    }

    /// Copies a gradient to the host, synchronously.
    pub(crate) fn to_host(&self, layer: usize, gradient: &Tensor) -> Result<Tensor> {
        let number = {
            let mut state = self.0.state.lock();
            state.counters.stored += (gradient.numel() * gradient.kind().elt_size_in_bytes()) as u64;
            state.layers[layer].number
        };
        let current = Stream::current(self.device())?;
        let begin = self.0.trace.begin(&current)?;
        let copied = || -> runtime::Result<Tensor> {
            self.0.options.at(HookPoint::Store)?;
            let pinned_for = self.0.placement.pinned_for;
            let mut copy = device::pinned_empty(&gradient.size(), gradient.kind(), pinned_for)?;
            let _no_grad = GradMode::off();
            copy.f_copy_(gradient)?;
            Ok(copy)
        };
        let copy = copied().map_err(|cause| not_stored(&self.name(layer), cause))?;
        let bytes = (gradient.numel() * gradient.kind().elt_size_in_bytes()) as u64;
        self.0.trace.end(&current, begin, (StreamKind::Store, number, Direction::Backward), bytes)?;
        Ok(copy)
    }
}

fn not_stored(layer: &str, cause: Error) -> Error {
    transfer("storing the gradients", layer, cause)
}
