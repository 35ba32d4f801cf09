//! The buffers that batches are written into on their way to a device.
//!
//! To lock pages, and to give locked pages back, waits for the whole device. So a worker keeps its buffers: each is written again
//! when the copy from it is done, which the buffer itself knows ([`PinnedBuffer::copy_to`]).

use std::collections::VecDeque;

use runtime::device::PinnedBuffer;

use crate::error::Result;

/// Buffers of one worker, at most: one that is written while others are copied from.
pub(super) const MOST: usize = 3;

/// Buffers that were copied from, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Staging {
    buffers: VecDeque<PinnedBuffer>,
}

impl Staging {
    /// The buffer for the next batch. `None` asks for a new one: copies from all that there are go on, and they are few. Writing
    /// to a buffer whose copy goes on waits for that copy.
    pub(super) fn take(&mut self) -> Result<Option<PinnedBuffer>> {
        let busy = match self.buffers.front() {
            Some(oldest) => oldest.is_being_copied()?,
            None => true,
        };
        Ok(if busy && self.buffers.len() < MOST { None } else { self.buffers.pop_front() })
    }

    /// Takes a buffer back whose copy was submitted.
    pub(super) fn put(&mut self, buffer: Option<PinnedBuffer>) {
        self.buffers.extend(buffer);
    }
}
