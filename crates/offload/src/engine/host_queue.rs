//! Queues the update of a layer's host tensors, such as an optimizer step, on the host thread.
//!
//! ```text
//! queued loads of old values ──► events in `after` ──► update ──► `updated` ──► next load of the layer
//! ```
//!
//! The loads go through two queues: the feeder, a host thread, submits them to the prefetch stream.

use std::sync::Arc;

use runtime::device::Event;
use tch::Device;

use super::Engine;
use crate::error::Result;
use crate::options::HookPoint;
use crate::schedule::Direction;
use crate::trace::StreamKind;

impl Engine {
    /// Queues `work`, the update of a layer's host tensors, on the host thread. It runs after the events in `after` and after every load that
    /// is already queued. Slots that contain the layer are stale from this call on. `updated_early` lists the tensors that are updated
    /// before the rest of the model. Returns the event that marks the end of the update.
    ///
    /// # Errors
    /// Errors of the device and of its streams. An error of `work` is reported by the host thread.
    pub(crate) fn submit_update(
        &self,
        layer: usize,
        after: &[Arc<Event>],
        updated_early: Vec<usize>,
        work: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<Arc<Event>> {
        let host = &self.0.host;
        let mut state = self.0.state.lock();
        // Loads that are queued read the old values, so the host thread waits for all of them.
        let loads_done = Arc::new(Event::untimed(self.device())?);
        if self.0.feeder.query()? {
            // The feeder is idle: every load is already in the prefetch stream.
            self.0.prefetch.record(&loads_done)?;
            host.wait(&loads_done)?;
        } else {
            // The feeder still has loads to submit. It records the event behind them; the host thread waits for the feeder, then for
            // the event.
            let (prefetch, after_loads) = (self.0.prefetch.clone(), loads_done.clone());
            self.0.feeder.submit(move || prefetch.record(&after_loads))?;
            let feeder_reached = Event::untimed(Device::Cpu)?;
            self.0.feeder.record(&feeder_reached)?;
            host.wait(&feeder_reached)?;
            host.submit(move || loads_done.synchronize())?;
        }
        for event in after {
            host.wait(event)?;
        }
        // Queue the update and the event of its end.
        let layer_state = &mut state.layers[layer];
        let begin = self.0.trace.begin(host)?;
        let options = self.0.options.clone();
        host.submit(move || {
            options.at(HookPoint::Update)?;
            work()
        })?;
        self.0.trace.end(host, begin, (StreamKind::Host, layer_state.number, Direction::Backward), 0)?;
        let updated = Arc::new(Event::untimed(Device::Cpu)?);
        host.record(&updated)?;
        // From here on slots with the old generation are stale, and the next load waits for `updated`.
        layer_state.generation += 1;
        layer_state.steps += 1;
        layer_state.updated_early.extend(updated_early);
        layer_state.updated = Some(updated.clone());
        layer_state.update_queued = true;
        Ok(updated)
    }
}
