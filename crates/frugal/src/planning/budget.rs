//! A budget, and what is held of it.

use accounting::quantity::bytes_text;
use runtime::device::{reset_resident_peak, resident_memory};
use runtime::memory::{Limit, Region, RegionUsage};
use tch::Device;

use crate::error::{Error, Result};

/// The share of a budget that a plan leaves free, for short-lived tensors and what libraries allocate as they go.
const SLACK: f64 = 0.03;

/// The share of the free memory that a training without a budget may take.
pub const FREE_SHARE: f64 = 0.8;

/// Returns the budget of a training without one: on the CPU the bytes that the process holds and [`FREE_SHARE`] of those that are
/// free, as the kernel and the process's control group say; on a GPU that share of its free bytes.
///
/// # Errors
/// A system that does not say.
pub fn default_budget(device: Device) -> Result<u64> {
    let free =
        runtime::device::memory_info(device)?.free.saturating_add(runtime::memory::cached_bytes(device)?);
    let held = match device {
        Device::Cpu => resident_memory()?.current,
        _ => 0,
    };
    Ok(held + (free as f64 * FREE_SHARE) as u64)
}

/// Returns the bytes of the device that tensors may take, of a budget that on the CPU is the whole process's.
///
/// # Errors
/// A budget below what the process takes already.
pub fn tensor_budget(budget: u64, device: Device) -> Result<u64> {
    let taken = match device {
        Device::Cpu => resident_memory()?.current,
        // What the libraries keep there is in the plan.
        _ => 0,
    };
    match budget.saturating_sub(taken).saturating_sub((budget as f64 * SLACK) as u64) {
        0 => Err(Error::Budget { budget: bytes_text(budget), taken: bytes_text(taken) }),
        free => Ok(free),
    }
}

/// Makes the allocator refuse what goes beyond the budget. `None` on a GPU, where only the environment can do that.
///
/// # Errors
/// More is live already.
pub fn enforce(device: Device, budget: u64) -> Result<Option<Limit>> {
    match device {
        Device::Cpu => Ok(Some(runtime::memory::limit(device, budget)?)),
        _ => Ok(None),
    }
}

/// Measures the peak memory of a stretch of work.
pub struct PeakMeter {
    region: Region,
}

/// The peak memory of a stretch of work.
#[derive(Clone, Copy, Debug)]
pub struct PeakUsage {
    /// Of the device's allocator.
    pub tensors: RegionUsage,
    /// The most bytes that the process held in RAM.
    pub process: u64,
}

impl PeakMeter {
    /// Starts to measure.
    ///
    /// # Errors
    /// A system that does not count.
    pub fn start(device: Device) -> Result<Self> {
        reset_resident_peak()?;
        Ok(Self { region: Region::start(device)? })
    }

    /// Returns the peaks since the start.
    ///
    /// # Errors
    /// A system that does not count.
    pub fn finish(self) -> Result<PeakUsage> {
        Ok(PeakUsage { tensors: self.region.finish()?, process: resident_memory()?.peak })
    }
}

impl PeakUsage {
    /// Returns the bytes that a budget is compared with: the process's on the CPU, the device's otherwise.
    pub fn counted(&self, device: Device) -> u64 {
        if device == Device::Cpu { self.process.max(self.tensors.peak) } else { self.tensors.peak }
    }
}
