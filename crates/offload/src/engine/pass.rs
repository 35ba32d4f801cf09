//! The end of a backward: what its caller expects to be done.
//!
//! Each layer's backward asks to be told of the end of the pass that it is a part of, and libtorch keeps that with the pass: several
//! passes at once, on threads of their own, end each for itself. A pass that fails lets go of what it was asked, which is an end too.

use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};

use parking_lot::Mutex;
use runtime::autograd::{Backward, GradMode, set_grad};

use super::{Engine, State};
use crate::error::{Error, Result};
use crate::home::Layer;

/// One request for the end of a backward.
#[derive(Debug, Default)]
pub(super) struct Ending {
    /// What was lost of a pass by a failure that another one met.
    failed: Mutex<Option<String>>,
}

/// Sees to the end of a backward, when it is told of it or dropped untold.
struct End {
    engine: Engine,
    ending: Arc<Ending>,
    /// Whose uses are over by then.
    thread: ThreadId,
    told: bool,
}

impl End {
    fn come(mut self) -> runtime::Result<()> {
        self.told = true;
        Ok(self.engine.end_pass(&self.ending, self.thread)?)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if self.told {
            return;
        }
        // The backward failed, and its caller has that error. What has arrived is the model's, as far as it got.
        let mut state = self.engine.0.state.lock();
        let _ = self.engine.settle_locked(&mut state);
        let _ = publish(&mut state);
    }
}

impl Engine {
    /// At the end of the backward that is running: waits for what the caller of backward expects to be done.
    pub(crate) fn await_end(&self, backward: &Backward) -> Result<()> {
        let ending = Arc::<Ending>::default();
        {
            let mut state = self.0.state.lock();
            state.endings.retain(|ending| ending.strong_count() > 0);
            state.endings.push(Arc::downgrade(&ending));
        }
        let end = End { engine: self.clone(), ending, thread: thread::current().id(), told: false };
        Ok(backward.at_end(move || end.come())?)
    }

    fn end_pass(&self, ending: &Ending, thread: ThreadId) -> Result<()> {
        // With the lock: nothing new is queued between the wait and the gradients' return to their tensors.
        let mut state = self.0.state.lock();
        state.leaving.clear();
        if let Some(reason) = ending.failed.lock().take() {
            return Err(Error::config("gradients", reason));
        }
        // The optimizer of the engine says itself when it is to be waited for.
        let steps = state.sink.is_some();
        let stored = self.0.store.synchronize();
        if let Err(error) = stored.and_then(|()| if steps { Ok(()) } else { self.0.host.synchronize() }) {
            Self::lose_gradients(&mut state, &error.to_string());
            return Err(error.into());
        }
        Self::await_trained_loads(&state);
        publish(&mut state)?;
        Self::check_not_in_use(state.uses.contains_key(&thread))?;
        Self::check_none_astray(&state)?;
        state.layers.iter().try_for_each(Layer::check_stepped)
    }

    /// Waits until trained layers that were read ahead are there: after a backward their memory may be written.
    fn await_trained_loads(state: &State) {
        for slot in state.ring.iter().flat_map(|ring| &ring.slots) {
            let trained =
                |layer: usize| state.layers[layer].is_trained() && state.layers[layer].updated.is_none();
            if slot.holds.as_ref().is_some_and(|holds| trained(holds.layer)) {
                // A failure is told to who uses the slot.
                let _ = slot.staged.synchronize().and_then(|()| slot.ready.synchronize());
            }
        }
    }

    /// Takes all gradients of layers away: what was not stored is no gradient. Every backward that is running fails at its end.
    pub(super) fn lose_gradients(state: &mut State, cause: &str) {
        for layer in &mut state.layers {
            layer.pending.iter_mut().for_each(|pending| *pending = None);
            for tensor in &layer.tensors {
                // A tensor that takes no gradient has none.
                let _ = set_grad(tensor, None);
            }
        }
        for ending in state.endings.iter().filter_map(Weak::upgrade) {
            ending.failed.lock().get_or_insert_with(|| {
                format!(
                    "gradients of this backward were lost when another one failed: {cause}; run both again"
                )
            });
        }
    }
}

impl Layer {
    /// That no tensor which was stepped within the backward has got another gradient since.
    fn check_stepped(&self) -> Result<()> {
        for &index in &self.ahead {
            if self.has_gradient(index)? {
                let reason = format!(
                    "`{}` got a gradient besides its layer's, after the layer was stepped within the same backward; use the weight in \
                     the loss after the model's forward, take the group's weight decay for such a term, or clip \
                     (`HostOptions::clip`), which waits for all gradients",
                    self.tensor_name(index)
                );
                return Err(Error::config("optimizer", reason));
            }
        }
        Ok(())
    }
}

/// Gives the sums of gradients back to their tensors, with what autograd has put there meanwhile.
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
