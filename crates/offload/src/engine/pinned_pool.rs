//! Reuse of page-locked buffers.

use std::sync::Arc;

use parking_lot::Mutex;
use runtime::device;
use tch::{Device, Tensor};

use crate::error::Result;

/// A pool of page-locked buffers: locking and unlocking pages takes longer than a copy, and synchronises the device.
#[derive(Debug, Clone, Default)]
pub(super) struct PinnedPool(Arc<Mutex<Vec<Tensor>>>);

impl PinnedPool {
    /// Returns a free buffer like `like`, or allocates one.
    pub(super) fn take(&self, like: &Tensor, pinned_for: Device) -> Result<Tensor> {
        let mut free = self.0.lock();
        let fits = |buffer: &Tensor| buffer.kind() == like.kind() && buffer.size() == like.size();
        match free.iter().position(fits) {
            Some(at) => Ok(free.swap_remove(at)),
            None => Ok(device::pinned_empty(&like.size(), like.kind(), pinned_for)?),
        }
    }

    /// Returns a buffer to the pool.
    pub(super) fn give(&self, buffer: Tensor) {
        self.0.lock().push(buffer);
    }
}
