//! A memory budget, and what tensors may take of it.
//!
//! A budget on a CPU is the whole process's, on a GPU the allocator's. Tensors may take what the program leaves beside a reserve:
//!
//! ```text
//! budget    total = program + reserve + tensors
//! reserve   3 %, at least 80 MiB; 8 MiB less where a training is resumed
//! program   what the process holds before tensors are allocated; on a GPU nothing, because what its libraries hold is in the plan
//! ```

use accounting::quantity::bytes_text;
use runtime::device::resident_memory;
use runtime::memory::Limit;
use tch::Device;

use super::peak_usage::prepared_bytes;
use crate::error::{Error, Result};

/// The share of the free memory that a training without a budget may take.
pub const FREE_SHARE: f64 = 0.8;

/// The share of a budget that a plan leaves free, for short-lived tensors and what libraries allocate as they go.
pub const RESERVE: f64 = 0.03;
/// The least that it leaves free: for the buffers that libraries make in the first step, the holes of the C library's heap, in which tensors
/// below 256 KiB are, and the libraries' own pages that the first step reads. The first two were 30 to 40 MiB in trainings of a model of one
/// million parameters and of one of 135, the last 15 MiB, and 30 MiB with the decompositions of DoRA, PiSSA and OLoRA.
pub const LEAST_RESERVE: u64 = 80 << 20;

/// Bytes that a program may take more when it resumes a training than when it began it.
const RESUMED: u64 = 8 << 20;

/// By how much [`Budget::for_tensors`] exceeds the least: what a process takes before its work differs from run to run, by 11 MiB where it has
/// tokenized a text.
const MARGIN: f64 = 0.01;
const LEAST_MARGIN: u64 = 24 << 20;

/// By how much of it a step's tensors may exceed their prediction, as `tests/it/predicted_peaks.rs` allows.
const PREDICTION_TOLERANCE: f64 = 0.05;

/// A memory budget of this process, or of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// All of it, in bytes.
    pub total: u64,
    /// Bytes that the process takes already, tensors included; 0 on a GPU.
    pub taken: u64,
    /// Bytes of tensors that are live already.
    pub live: u64,
    /// The most bytes that the process has held in RAM to prepare the data, which a budget has to be at least; 0 on a GPU.
    pub prepared: u64,
    /// Whether an earlier training is resumed: what fitted must fit again where the program takes some mebibytes more.
    pub resumes: bool,
    /// Whether it is [`FREE_SHARE`] of the free memory, because none was given.
    pub is_default: bool,
}

impl Budget {
    /// Returns a budget of `total` bytes, and counts what is taken of it.
    ///
    /// # Errors
    /// A system that does not count.
    pub fn new(total: u64, device: Device) -> Result<Self> {
        let (taken, live) = (taken(device)?, runtime::memory::live_bytes(device)?);
        Ok(Self { total, taken, live, prepared: prepared_bytes(device), resumes: false, is_default: false })
    }

    /// Returns the budget that is given, or that of [`default_budget`] for one of `processes` that share the device.
    ///
    /// # Errors
    /// A system that does not count.
    pub fn given_or_default(given: Option<u64>, device: Device, processes: usize) -> Result<Self> {
        let total = given.map_or_else(|| default_budget(device, processes), Ok)?;
        Ok(Self { is_default: given.is_none(), ..Self::new(total, device)? })
    }

    /// Returns the budget of a GPU with so many bytes of memory that no process uses: what is given, or [`FREE_SHARE`] of them.
    pub fn of_gpu(given: Option<u64>, memory: u64) -> Self {
        let total = given.unwrap_or((memory as f64 * FREE_SHARE) as u64);
        Self { total, taken: 0, live: 0, prepared: 0, resumes: false, is_default: given.is_none() }
    }

    /// Returns the bytes that a plan leaves free.
    fn reserve(&self) -> u64 {
        ((self.total as f64 * RESERVE) as u64).max(LEAST_RESERVE) - self.resumed()
    }

    fn resumed(&self) -> u64 {
        if self.resumes { RESUMED } else { 0 }
    }

    /// Returns the bytes that further tensors may take.
    ///
    /// # Errors
    /// A budget below what the process takes, or took to prepare the data: [`Error::Budget`] with the least.
    pub fn free(&self) -> Result<u64> {
        let prepared = self.prepared.saturating_sub(self.resumed());
        match self.unreserved() {
            free if free > 0 && self.total >= prepared => Ok(free),
            _ => {
                let least = bytes_text(self.for_tensors(self.live));
                Err(Error::Budget { budget: bytes_text(self.total), least })
            }
        }
    }

    fn unreserved(&self) -> u64 {
        self.total.saturating_sub(self.taken).saturating_sub(self.reserve())
    }

    /// Returns the bytes that all tensors may take, those that are live included; only these of a budget that is too small.
    pub fn tensors(&self) -> u64 {
        self.live + self.free().unwrap_or(0)
    }

    /// Returns a budget that leaves `tensors` bytes, or as many as this one where they are fewer: that of ranks that decide alike.
    #[must_use]
    pub fn for_at_most(self, tensors: u64) -> Self {
        Self { taken: self.taken + self.tensors().saturating_sub(tensors), ..self }
    }

    /// Returns the bytes at which the allocator refuses tensors: a prediction may be wrong by some percent, for which the reserve has room.
    pub fn enforced(&self) -> u64 {
        let tensors = self.tensors();
        tensors + ((tensors as f64 * PREDICTION_TOLERANCE) as u64).min(self.reserve() / 2)
    }

    /// Returns what the program holds beside tensors.
    pub fn program(&self) -> u64 {
        self.total.saturating_sub(self.tensors()).saturating_sub(self.reserve())
    }

    /// Returns the budget that the program, `tensors` and the reserve fill.
    pub fn held_with(&self, tensors: u64) -> u64 {
        with_reserve(tensors + self.program()) - self.resumed()
    }

    /// Returns the smallest budget, in whole mebibytes, in which tensors may take so many bytes and the data can be prepared, with a margin:
    /// both differ from run to run.
    pub fn for_tensors(&self, tensors: u64) -> u64 {
        let sum = self.taken.saturating_add(tensors.saturating_sub(self.live));
        let least = with_reserve(sum.saturating_add(((sum as f64 * MARGIN) as u64).max(LEAST_MARGIN)));
        let of_preparation = match self.prepared {
            0 => 0,
            bytes => bytes + bytes / 32 + LEAST_MARGIN,
        };
        let mebibytes = |bytes: u64| bytes.div_ceil(1 << 20) << 20;
        mebibytes(least).max(mebibytes(of_preparation)) - self.resumed()
    }
}

/// Returns the smallest budget that leaves so many bytes beside its reserve.
fn with_reserve(bytes: u64) -> u64 {
    ((bytes as f64 / (1.0 - RESERVE)) as u64).max(bytes.saturating_add(LEAST_RESERVE))
}

/// Returns the budget of a training without one: on the CPU the bytes that the process holds and [`FREE_SHARE`] of those that are
/// free, as the kernel and the process's control group say; on a GPU that share of its free bytes.
///
/// # Errors
/// A system that does not say.
pub fn default_budget(device: Device, processes: usize) -> Result<u64> {
    let free =
        runtime::device::memory_info(device)?.free.saturating_add(runtime::memory::cached_bytes(device)?);
    let process = match device {
        Device::Cpu => resident_memory()?.current,
        _ => 0,
    };
    Ok(process + (free as f64 * FREE_SHARE) as u64 / processes.max(1) as u64)
}

/// Returns the bytes that the process takes of a budget.
fn taken(device: Device) -> Result<u64> {
    Ok(match device {
        Device::Cpu => {
            // What loading and encoding data took, and freed, is no part of what follows.
            runtime::memory::release_freed_pages();
            resident_memory()?.current
        }
        _ => 0,
    })
}

/// Makes the allocator refuse what goes beyond so many bytes. `None` on a GPU, where only the environment can do that.
///
/// # Errors
/// More is live already.
pub fn enforce(device: Device, bytes: u64) -> Result<Option<Limit>> {
    match device {
        Device::Cpu => Ok(Some(runtime::memory::limit(device, bytes)?)),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(total: u64, taken: u64) -> Budget {
        Budget { total, taken, live: 0, prepared: 0, resumes: false, is_default: false }
    }

    /// A GPU that is planned for has the default of a training on it: 80 % of its memory, less the reserve of 3 %.
    #[test]
    fn a_gpu_of_a_data_sheet_has_the_budget_of_a_training_on_it() {
        let default = Budget::of_gpu(None, 80_000_000_000);
        assert_eq!((default.total, default.free().unwrap()), (64_000_000_000, 62_080_000_000));
        let given = Budget::of_gpu(Some(10 << 30), 80_000_000_000);
        assert_eq!((given.total, given.is_default), (10 << 30, false));
        assert_eq!(given.free().unwrap(), (10 << 30) - (10u64 << 30) * 3 / 100);
    }

    /// The least budget suffices, and a budget of a few percent less does not.
    #[test]
    fn the_least_budget_is_the_least() {
        for (taken, tensors) in [(0, 1 << 20), (135 << 20, 0), (135 << 20, 900 << 20), (1 << 30, 700 << 30)] {
            let least = budget(0, taken).for_tensors(tensors);
            let free = |total: u64| budget(total, taken).unreserved();
            assert!(free(least) > tensors, "{least}");
            assert!(free((least as f64 * 0.98) as u64 - LEAST_MARGIN - (1 << 20)) <= tensors, "{least}");
            // A resumed training may take 8 MiB more beside its tensors.
            let resumed = Budget { resumes: true, ..budget(0, taken) }.for_tensors(tensors);
            assert_eq!(least - resumed, RESUMED);
            let resumed = Budget { resumes: true, ..budget(resumed, taken) };
            assert_eq!(resumed.unreserved() >> 20, free(least) >> 20);
        }
        let small = Budget::new(1 << 20, Device::Cpu).unwrap();
        let error = small.free().unwrap_err().to_string();
        assert!(error.contains(" that the program itself needs; give a larger --budget"), "{error}");
        let enough = Budget { total: small.for_tensors(small.live), ..small };
        assert!(enough.free().is_ok());
        assert_eq!(enough.total, enough.program() + enough.tensors() + enough.reserve());
    }
}
