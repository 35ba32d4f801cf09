//! Live bytes of a simulated pass and their maximum, as the allocator counts them.

use crate::Error;

/// Tracks live bytes and their maximum.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PeakTracker {
    live: u128,
    peak: u128,
}

impl PeakTracker {
    /// Allocates.
    pub(crate) fn make(&mut self, bytes: u64) {
        self.live += u128::from(bytes);
        self.peak = self.peak.max(self.live);
    }

    /// Frees.
    pub(crate) fn free(&mut self, bytes: u64) {
        self.live -= u128::from(bytes);
    }

    /// Allocates and frees.
    pub(crate) fn touch(&mut self, bytes: u64) {
        self.make(bytes);
        self.free(bytes);
    }

    /// Returns the live bytes.
    pub(crate) fn live(&self) -> u128 {
        self.live
    }

    /// Frees everything allocated since [`PeakTracker::live`] was `before`.
    pub(crate) fn release_since(&mut self, before: u128) {
        self.live = before;
    }

    /// Returns the maximum of live bytes.
    ///
    /// # Errors
    /// More than 64 bits.
    pub(crate) fn peak(&self) -> Result<u64, Error> {
        u64::try_from(self.peak).map_err(|_| Error::Overflow {
            what: "bytes of a pass",
            bits: 64,
            terms: self.peak.to_string(),
        })
    }
}
