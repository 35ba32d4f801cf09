//! The end of a backward pass.
//!
//! Each layer's backward registers a callback for the end of its pass, which libtorch stores with the pass, so concurrent
//! passes on several threads end independently. A failed pass drops its callbacks, which also counts as its end.

use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};

use parking_lot::Mutex;
use runtime::autograd::{Backward, GradMode, set_grad};

use super::{Engine, State};
use crate::error::{Result, refused};
use crate::storage::Layer;

/// A callback that is registered with a running backward.
#[derive(Debug, Default)]
pub(super) struct EndRequest {
    /// Why this pass lost gradients, if another pass failed.
    failed: Mutex<Option<String>>,
}

/// Ends a backward pass, either when called or when dropped.
struct EndGuard {
    engine: Engine,
    end_request: Arc<EndRequest>,
    /// The thread whose uses are over at the end.
    thread: ThreadId,
    finished: bool,
}

impl EndGuard {
    /// Ends the pass, and returns the errors that a drop would lose.
    fn finish(mut self) -> Result<()> {
        self.finished = true;
        self.engine.end_pass(&self.end_request, self.thread)
    }
}

impl Drop for EndGuard {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        // The backward failed, and its caller has that error. Gradients that have arrived are kept.
        let mut state = self.engine.0.state.lock();
        let _ = self.engine.recover_locked(&mut state);
        let _ = publish(&mut state);
    }
}

impl Engine {
    /// Registers a callback for the end of the running backward, which waits for all work of the backward.
    pub(crate) fn at_backward_end(&self, backward: &Backward) -> Result<()> {
        let end_request = Arc::<EndRequest>::default();
        {
            let mut state = self.0.state.lock();
            state.end_requests.retain(|end_request| end_request.strong_count() > 0);
            state.end_requests.push(Arc::downgrade(&end_request));
        }
        let end =
            EndGuard { engine: self.clone(), end_request, thread: thread::current().id(), finished: false };
        backward.at_end(move || end.finish())
    }

    fn end_pass(&self, end_request: &EndRequest, thread: ThreadId) -> Result<()> {
        // With the lock, so that nothing is queued between the wait and the return of gradients to their tensors.
        let mut state = self.0.state.lock();
        state.stores_in_flight.clear();
        if let Some(reason) = end_request.failed.lock().take() {
            return Err(refused("gradients", reason));
        }
        // The engine's optimizer decides itself when to wait for its steps.
        let steps = state.consumer.is_some();
        let stored = self.0.store.synchronize();
        if let Err(error) = stored.and_then(|()| if steps { Ok(()) } else { self.0.host.synchronize() }) {
            Self::discard_gradients(&mut state, &error.to_string());
            return Err(error);
        }
        Self::await_trained_loads(&state);
        publish(&mut state)?;
        Self::check_not_in_use(state.uses.contains_key(&thread))?;
        Self::check_none_misplaced(&state)?;
        state.layers.iter().try_for_each(Layer::check_stepped)
    }

    /// Waits for prefetched trained layers: after a backward their host memory may be written.
    fn await_trained_loads(state: &State) {
        for slot in state.ring.iter().flat_map(|ring| &ring.slots) {
            let trained =
                |layer: usize| state.layers[layer].is_trained() && state.layers[layer].updated.is_none();
            if slot.holds.as_ref().is_some_and(|holds| trained(holds.layer)) {
                // A failure is reported to the user of the slot.
                let _ = slot.staged.synchronize().and_then(|()| slot.ready.synchronize());
            }
        }
    }

    /// Discards all gradients of layers, because some could not be stored. Every running backward fails at its end.
    pub(super) fn discard_gradients(state: &mut State, cause: &str) {
        for layer in &mut state.layers {
            layer.pending.iter_mut().for_each(|pending| *pending = None);
            for tensor in &layer.tensors {
                // A tensor that requires no gradient has none.
                let _ = set_grad(tensor, None);
            }
        }
        for end_request in state.end_requests.iter().filter_map(Weak::upgrade) {
            end_request.failed.lock().get_or_insert_with(|| {
                format!(
                    "gradients of this backward were lost when another one failed: {cause}; run both again"
                )
            });
        }
    }
}

impl Layer {
    /// Checks that no tensor that was stepped during the backward got another gradient since.
    fn check_stepped(&self) -> Result<()> {
        for &index in &self.updated_early {
            if self.has_gradient(index)? {
                let reason = format!(
                    "`{}` got another gradient after its layer was updated in the same backward; use the weight in \
                     the loss after the model's forward, use the group's weight decay for such a term, or clip \
                     (`HostAdamWConfig::clip`), which waits for all gradients",
                    self.tensor_name(index)
                );
                return Err(refused("optimizer", reason));
            }
        }
        Ok(())
    }
}

/// Writes the gradient sums to `.grad`, adding what autograd wrote there meanwhile.
fn publish(state: &mut State) -> Result<()> {
    let _no_grad = GradMode::off();
    for layer in &mut state.layers {
        for (tensor, pending) in layer.tensors.iter().zip(&mut layer.pending) {
            let Some(mut sum) = pending.take() else { continue };
            let other = tensor.f_grad()?;
            if other.defined() {
                for event in &layer.arrived {
                    event.synchronize()?;
                }
                let _ = sum.f_add_(&other)?;
            }
            set_grad(tensor, Some(&sum))?;
        }
    }
    Ok(())
}
