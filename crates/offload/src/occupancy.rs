//! Checks at run time that slots are not written while they are read.
//!
//! Events order the streams so that a slot is never written while it is read. Tests prove that of the schedule; this checks its
//! execution. On the CPU the checks run with the streams' work. On CUDA they would run when work is queued, which means
//! nothing, so nothing is checked.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use runtime::{Error, Result};

/// Number of readers of a slot; negative for a writer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Occupancy(Arc<AtomicI64>);

const WRITER: i64 = -1;

/// Leaves the slot when dropped.
#[derive(Debug)]
pub(crate) struct OccupancyGuard {
    occupancy: Occupancy,
    leaves: i64,
}

impl Occupancy {
    /// Starts a read. Other reads may run at the same time.
    pub(crate) fn read(&self) -> Result<OccupancyGuard> {
        let seen =
            self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| (now >= 0).then_some(now + 1));
        seen.map(|_| OccupancyGuard { occupancy: self.clone(), leaves: 1 })
            .map_err(|_| Error::invalid("offload ring", "a slot is read while it is written; this is a bug"))
    }

    /// Starts an exclusive write.
    pub(crate) fn write(&self) -> Result<OccupancyGuard> {
        let seen = self.0.compare_exchange(0, WRITER, Ordering::AcqRel, Ordering::Acquire);
        seen.map(|_| OccupancyGuard { occupancy: self.clone(), leaves: WRITER }).map_err(|_| {
            Error::invalid("offload ring", "a slot is written while it is in use; this is a bug")
        })
    }
}

impl Drop for OccupancyGuard {
    fn drop(&mut self) {
        self.occupancy.0.fetch_sub(self.leaves, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_readers_or_one_writer() {
        let slot = Occupancy::default();
        let (a, b) = (slot.read().unwrap(), slot.read().unwrap());
        assert!(slot.write().unwrap_err().to_string().contains("written while it is in use"));
        drop(a);
        assert!(slot.write().is_err());
        drop(b);
        let writer = slot.write().unwrap();
        assert!(slot.read().unwrap_err().to_string().contains("read while it is written"));
        assert!(slot.write().is_err());
        drop(writer);
        slot.read().unwrap();
    }
}
