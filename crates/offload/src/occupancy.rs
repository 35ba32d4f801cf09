//! Who is in a slot: a check of the schedule where it is executed.
//!
//! Events order the lanes, so that a slot is never written while it is read. That is proven for the schedule by itself; here it is
//! watched in the execution. On the CPU the lanes' work passes here when it runs. On CUDA it passes when it is queued, which says
//! nothing, and nothing is checked.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use runtime::{Error, Result};

/// Readers of a slot, or below 0 its writer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Occupancy(Arc<AtomicI64>);

const WRITER: i64 = -1;

/// Leaves the slot when it is dropped.
#[derive(Debug)]
pub(crate) struct Inside {
    occupancy: Occupancy,
    leaves: i64,
}

impl Occupancy {
    /// Enters to read. Others may read too.
    pub(crate) fn read(&self) -> Result<Inside> {
        let seen =
            self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| (now >= 0).then_some(now + 1));
        seen.map(|_| Inside { occupancy: self.clone(), leaves: 1 })
            .map_err(|_| Error::invalid("offload ring", "a slot is read while it is written; this is a bug"))
    }

    /// Enters to write, alone.
    pub(crate) fn write(&self) -> Result<Inside> {
        let seen = self.0.compare_exchange(0, WRITER, Ordering::AcqRel, Ordering::Acquire);
        seen.map(|_| Inside { occupancy: self.clone(), leaves: WRITER }).map_err(|_| {
            Error::invalid("offload ring", "a slot is written while it is in use; this is a bug")
        })
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.occupancy.0.fetch_sub(self.leaves, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_read_and_one_writes() {
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
