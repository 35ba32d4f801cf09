//! The pinned buffers of a worker, for copies to a device.
//!
//! Locking and unlocking pages synchronises the whole device. So a worker keeps its buffers and reuses each after the copy
//! from it is done, which the buffer tracks ([`PinnedBuffer::copy_to`]).

use std::collections::VecDeque;

use runtime::device::PinnedBuffer;

use crate::error::Result;

/// The maximum number of buffers per worker: one to write to while others are copied from.
pub(super) const MOST: usize = 3;

/// Buffers whose copies were submitted, oldest first.
#[derive(Debug, Default)]
pub(super) struct Staging {
    buffers: VecDeque<PinnedBuffer>,
}

impl Staging {
    /// Returns a buffer for the next batch, or `None` to allocate one: all copies are in progress and there are few
    /// buffers. Writing to a buffer waits for its copy.
    pub(super) fn take(&mut self) -> Result<Option<PinnedBuffer>> {
        let busy = match self.buffers.front() {
            Some(oldest) => oldest.is_being_copied()?,
            None => true,
        };
        Ok(if busy && self.buffers.len() < MOST { None } else { self.buffers.pop_front() })
    }

    /// Takes a buffer after its copy was submitted.
    pub(super) fn put(&mut self, buffer: Option<PinnedBuffer>) {
        self.buffers.extend(buffer);
    }
}
