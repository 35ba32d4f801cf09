//! Live bytes, and the most of them.

use crate::Error;

/// Bytes that are live, and the most that were live at once.
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

    /// Frees what was allocated.
    pub(crate) fn free(&mut self, bytes: u64) {
        self.live -= u128::from(bytes);
    }

    /// Allocates and frees.
    pub(crate) fn touch(&mut self, bytes: u64) {
        self.make(bytes);
        self.free(bytes);
    }

    /// Bytes that are live.
    #[cfg(test)]
    pub(crate) fn live(&self) -> u128 {
        self.live
    }

    /// A position to go back to with [`PeakTracker::release_since`].
    pub(crate) fn mark(&self) -> u128 {
        self.live
    }

    /// Frees all that was allocated since `mark`.
    pub(crate) fn release_since(&mut self, mark: u128) {
        self.live = mark;
    }

    /// The most bytes that were live at once.
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
