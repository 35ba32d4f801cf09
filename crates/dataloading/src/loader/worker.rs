//! What makes a batch: in a worker thread, or in the caller's where there is none.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use runtime::device::{Event, Stream};
use tch::Device;

use super::LoaderOptions;
use super::cursor::{Cursor, Place};
use super::queue::Queue;
use crate::batch::Batch;
use crate::batch_source::BatchSource;
use crate::error::{Error, Result};
use crate::host_batch::HostBatch;

/// A batch, and on CUDA the event behind its copy.
pub(super) struct Made {
    pub(super) batch: Batch,
    pub(super) copied: Option<Event>,
}

pub(super) struct Builder {
    source: Arc<dyn BatchSource>,
    device: Device,
    /// Where copies to the device go.
    stream: Option<Stream>,
    host: HostBatch,
}

impl Builder {
    pub(super) fn new(source: Arc<dyn BatchSource>, options: &LoaderOptions, stream: Option<Stream>) -> Self {
        let device = options.device;
        Self { source, device, stream, host: HostBatch::in_memory(device, options.pinned) }
    }

    /// Moves the cursor on by a round.
    pub(super) fn next_place(&self, cursor: &mut Cursor, options: &LoaderOptions) -> Result<Option<Place>> {
        let at = Place { epoch: cursor.epoch, index: cursor.position as usize };
        caught(at, || cursor.next_place(options, &*self.source))?
    }

    /// The batch of a place; an error names it.
    pub(super) fn make(&mut self, place: Place) -> Result<Made> {
        let made = caught(place, || self.fill_and_finish(place))?;
        made.map_err(|cause| Error::Batch {
            epoch: place.epoch,
            batch: place.index as u64,
            cause: Box::new(cause),
        })
    }

    fn fill_and_finish(&mut self, place: Place) -> Result<Made> {
        let Some(stream) = &self.stream else {
            self.source.fill(place.epoch, place.index, &mut self.host)?;
            return Ok(Made { batch: self.host.finish()?, copied: None });
        };
        // Memory that was copied from could only be written again after a wait for the whole device. libtorch knows when
        // the copy alone is done, and keeps page-locked memory for the next who asks.
        drop(self.host.exchange(None));
        self.source.fill(place.epoch, place.index, &mut self.host)?;
        let _current = stream.enter()?;
        let batch = self.host.finish_on_device()?;
        let copied = Event::untimed(self.device)?;
        stream.record(&copied)?;
        Ok(Made { batch, copied: Some(copied) })
    }
}

/// A worker's life.
pub(super) fn run(queue: &Queue, builder: &mut Builder, options: &LoaderOptions) {
    while let Some(mut ticket) = queue.ticket(|cursor| builder.next_place(cursor, options)) {
        let began = Instant::now();
        // Whatever happens, the ticket's slot is filled: the consumer waits for it.
        let filled = caught(ticket.place, || {
            drop(builder.host.exchange(ticket.memory.take()));
            let made = builder.make(ticket.place);
            let memory = if builder.stream.is_none() { builder.host.exchange(None) } else { None };
            (made, memory)
        });
        let (made, memory) = filled.unwrap_or_else(|error| (Err(error), None));
        queue.put(&ticket, made, memory, began.elapsed().as_secs_f64());
    }
}

/// Runs a source's code; a panic becomes an error with the place.
fn caught<R>(place: Place, run: impl FnOnce() -> R) -> Result<R> {
    // After a panic the loader ends, so nobody sees what was left half done.
    catch_unwind(AssertUnwindSafe(run)).map_err(|payload| {
        let words = payload.downcast_ref::<&str>().map(|words| (*words).to_owned());
        let message = words.or_else(|| payload.downcast_ref::<String>().cloned());
        // Dropping what somebody panicked with may panic. It is one value in a loader's life.
        std::mem::forget(payload);
        Error::Worker {
            epoch: place.epoch,
            batch: place.index as u64,
            message: message.unwrap_or_else(|| "it said nothing".into()),
        }
    })
}
