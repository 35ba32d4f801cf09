//! Updates of layers on the host thread.

use std::sync::Arc;

use runtime::device::Event;
use tch::Device;

use super::Engine;
use crate::error::Result;
use crate::options::HookPoint;
use crate::schedule::Direction;
use crate::trace::StreamKind;

impl Engine {
    /// Queues an update of a layer's host tensors on the host thread, after `after` and after every load that is already
    /// queued. Slots with the layer are stale from here on. `ahead` lists tensors that are updated before the rest of the
    /// model. Returns the event that marks the end of the update.
    pub(crate) fn submit_update(
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
            // Loads that are not in the prefetch stream yet are before this in the feeder.
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
            options.at(HookPoint::Update)?;
            work()
        })?;
        self.0.trace.end(host, begin, (StreamKind::Host, of.number, Direction::Backward), 0)?;
        let updated = Arc::new(Event::untimed(Device::Cpu)?);
        host.record(&updated)?;
        of.generation += 1;
        of.steps += 1;
        of.ahead.extend(ahead);
        of.updated = Some(updated.clone());
        of.update_queued = true;
        Ok(updated)
    }
}
