//! Making a batch, in a worker thread or in the thread of the caller.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use runtime::device::{Event, Stream};
use tch::Device;

use super::LoaderConfig;
use super::cursor::{BatchId, Cursor};
use super::queue::Queue;
use super::staging::Staging;
use crate::batch::Batch;
use crate::batch_source::BatchSource;
use crate::error::{Error, Result};
use crate::host_batch::HostBatch;

/// A batch, and on CUDA the event after its copy.
pub(super) struct Made {
    pub(super) batch: Batch,
    pub(super) copied: Option<Event>,
}

pub(super) struct Builder {
    source: Arc<dyn BatchSource>,
    device: Device,
    /// The stream of copies to the device.
    stream: Option<Stream>,
    /// The buffers for these copies.
    staging: Staging,
    host: HostBatch,
}

impl Builder {
    pub(super) fn new(source: Arc<dyn BatchSource>, options: &LoaderConfig, stream: Option<Stream>) -> Self {
        let device = options.device;
        let host = HostBatch::in_memory(device, options.pinned);
        Self { source, device, stream, staging: Staging::default(), host }
    }

    /// Advances the cursor by one round.
    pub(super) fn next_batch(&self, cursor: &mut Cursor, options: &LoaderConfig) -> Result<Option<BatchId>> {
        let at = BatchId { epoch: cursor.epoch, index: cursor.position as usize };
        caught(at, || cursor.next_batch(options, &*self.source))?
    }

    /// Makes one batch; an error names its epoch and index.
    pub(super) fn make(&mut self, id: BatchId) -> Result<Made> {
        // By this name `trace` knows a loader's thread, and its work.
        let _range = runtime::profile::range("load");
        let made = caught(id, || self.fill_and_finish(id))?;
        made.map_err(|cause| Error::Batch { epoch: id.epoch, batch: id.index as u64, cause: Box::new(cause) })
    }

    fn fill_and_finish(&mut self, id: BatchId) -> Result<Made> {
        let Some(stream) = &self.stream else {
            self.source.fill(id.epoch, id.index, &mut self.host)?;
            return Ok(Made { batch: self.host.finish()?, copied: None });
        };
        let buffer = self.staging.take()?;
        drop(self.host.exchange(buffer));
        let filled = self.source.fill(id.epoch, id.index, &mut self.host);
        let batch = filled.and_then(|()| self.host.finish_in(stream));
        self.staging.put(self.host.exchange(None));
        let batch = batch?;
        let copied = Event::untimed(self.device)?;
        stream.record(&copied)?;
        Ok(Made { batch, copied: Some(copied) })
    }
}

/// The loop of a worker thread.
pub(super) fn run(queue: &Queue, builder: &mut Builder, options: &LoaderConfig) {
    while let Some(mut ticket) = queue.ticket(|cursor| builder.next_batch(cursor, options)) {
        let began = Instant::now();
        // The slot is filled in any case: the consumer waits for it.
        let filled = caught(ticket.id, || {
            drop(builder.host.exchange(ticket.memory.take()));
            let made = builder.make(ticket.id);
            let memory = if builder.stream.is_none() { builder.host.exchange(None) } else { None };
            (made, memory)
        });
        let (made, memory) = filled.unwrap_or_else(|error| (Err(error), None));
        queue.put(&ticket, made, memory, began.elapsed().as_secs_f64());
    }
}

/// Runs code of a source and turns a panic into an error with epoch and index.
fn caught<R>(id: BatchId, run: impl FnOnce() -> R) -> Result<R> {
    // The loader ends after a panic, so no state that it left is used.
    catch_unwind(AssertUnwindSafe(run)).map_err(|payload| {
        let words = payload.downcast_ref::<&str>().map(|words| (*words).to_owned());
        let message = words.or_else(|| payload.downcast_ref::<String>().cloned());
        // Dropping a panic's payload may panic itself, so it is leaked: one value per loader.
        std::mem::forget(payload);
        Error::Worker {
            epoch: id.epoch,
            batch: id.index as u64,
            message: message.unwrap_or_else(|| "no message".into()),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use runtime::device::pinned_bytes;

    use super::super::staging::MOST;
    use super::*;
    use crate::{BatchConfig, StandardDataset};

    fn tokens(batch: &Batch) -> Vec<i64> {
        Vec::try_from(batch.tokens.reshape([-1])).unwrap()
    }

    /// A CPU stream stands in for a device's: copies run when it reaches them.
    #[test]
    fn a_worker_reuses_few_buffers_and_never_one_being_copied() {
        // Similar lengths, so that all batches have buffers of one size.
        let samples: Vec<Vec<u32>> = (0..120).map(|index| vec![index; 500 + index as usize % 7]).collect();
        let batching = BatchConfig { batch_size: 4, ..BatchConfig::default() };
        let source: Arc<dyn BatchSource> = Arc::new(StandardDataset::new(samples, &batching).unwrap());
        let live = || pinned_bytes(Device::Cpu).unwrap().live;
        let before = live();

        let stream = Stream::new(Device::Cpu).unwrap();
        let mut builder = Builder::new(source.clone(), &LoaderConfig::default(), Some(stream.clone()));
        let (open, gate) = channel::<()>();
        stream
            .submit(move || {
                let _ = gate.recv();
                Ok(())
            })
            .unwrap();
        let mut make = |index| builder.make(BatchId { epoch: 0, index }).unwrap();
        // While no copy runs, each batch gets its own buffer.
        let mut made: Vec<Made> = Vec::new();
        for index in 0..MOST {
            made.push(make(index));
            assert!(made.iter().all(|made| !made.copied.as_ref().unwrap().query().unwrap()));
        }
        let of_buffers = live() - before;
        assert!(of_buffers >= MOST as u64 * 4 * 500 * 16, "{of_buffers} bytes");
        // From here on buffers are reused, each after its own copy.
        drop(open);
        let batches = source.batches(0);
        made.extend((MOST..batches).map(&mut make));
        assert_eq!((made.len(), live() - before), (30, of_buffers));
        stream.synchronize().unwrap();
        for (index, made) in made.iter().enumerate() {
            assert!(made.copied.as_ref().unwrap().query().unwrap());
            assert_eq!(tokens(&made.batch), tokens(&source.batch(0, index).unwrap()), "batch {index}");
        }
        drop(builder);
        assert_eq!(live(), before);
    }
}
