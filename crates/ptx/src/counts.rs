//! Counts of a launch: instructions, accesses, sectors.

use crate::instruction::Class;

/// Counts of one launch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions of warps, by [`Class`].
    pub(crate) of_class: [u64; Class::ALL.len()],
    /// Accesses to global memory, of warps.
    pub global_requests: u64,
    /// Sectors of 32 bytes that they touch.
    pub sectors: u64,
    /// Sectors that would hold the bytes of each access.
    pub least_sectors: u64,
    /// Loads and stores of 16 bytes for each thread among the requests.
    pub wide_requests: u64,
    /// Bytes of buffers that were read, each counted once.
    pub bytes_read: u64,
    /// Bytes of buffers that were written, each counted once.
    pub bytes_written: u64,
    /// Accesses to shared memory, of warps.
    pub shared_requests: u64,
    /// Passes over the banks of shared memory beyond one for each access.
    pub bank_conflicts: u64,
    /// Barriers of blocks.
    pub barriers: u64,
    /// Branches on which the lanes of a warp disagreed.
    pub divergent_branches: u64,
}

impl Counts {
    /// Instructions of warps.
    pub fn instructions(&self) -> u64 {
        self.of_class.iter().sum()
    }

    /// Instructions of warps of one class.
    pub fn of(&self, class: Class) -> u64 {
        self.of_class[class as usize]
    }

    /// Sectors that are touched, over the fewest that would hold the same bytes; 1 is best.
    pub fn sector_ratio(&self) -> f64 {
        if self.least_sectors == 0 { 1.0 } else { self.sectors as f64 / self.least_sectors as f64 }
    }
}
