//! Live and peak bytes of the device allocators, the peak of a region of code, and a limit.
//!
//! On CUDA the figures are those of libtorch's caching allocator (bytes in tensors, not bytes reserved). On the CPU the first call
//! installs a counting allocator before libtorch's own; it counts every later allocation and release in exact bytes, on any thread.
//! Memory that libraries inside libtorch allocate themselves (a matrix product's packing buffers) is not counted.
//!
//! The counting allocator maps each block from 256 KiB on by itself, so that a freed one is no hole in the C library's heap; between blocks of
//! alternating sizes such holes were 5 to 10 % of a process's memory. A freed block goes back to the system at once, as from libtorch's own
//! allocator. A program whose tensors are most of its memory turns on a cache of these blocks, as CUDA's allocator has one
//! ([`set_block_cache`]): a training step allocates the same sizes again and again. It also requests huge pages ([`set_huge_pages`]), and
//! refuses allocations beyond a [`limit`].
//!
//! ```
//! use runtime::memory::Region;
//! use tch::{Device, Tensor, kind};
//!
//! let region = Region::start(Device::Cpu)?;
//! let kept = Tensor::zeros([1024], kind::FLOAT_CPU);
//! drop(Tensor::zeros([2048], kind::FLOAT_CPU));
//! let usage = region.finish()?;
//! assert_eq!(usage.peak_above_start(), 3 * 4096);
//! assert_eq!(usage.live_after - usage.live_before, 4096);
//! # drop(kept);
//! # Ok::<(), runtime::Error>(())
//! ```

mod failures;
mod limit;
mod movable;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::{Device, Tensor};

pub use failures::{FailedAllocations, fail_allocations};
pub use limit::{Limit, limit};
pub use movable::{Attached, MovableMemory};

use crate::error::Result;
pub use crate::sys::heap::release_freed_pages;
pub use crate::sys::kernel_caches::limit_kernel_caches;
use crate::sys::memory as sys;

/// The memory that a [`Region`] used, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionUsage {
    /// Live bytes at the region's start.
    pub live_before: u64,
    /// Live bytes at its end.
    pub live_after: u64,
    /// The maximum of live bytes in between.
    pub peak: u64,
}

impl RegionUsage {
    /// Returns the peak above the live bytes at the region's start.
    pub fn peak_above_start(&self) -> u64 {
        self.peak - self.live_before
    }
}

/// Returns whether nothing else uses the memory of `tensor`, so that it may be overwritten: this is the tensor's only handle, the
/// tensor the only one on its storage, and no graph holds it.
///
/// # Errors
/// Errors of libtorch.
///
/// ```
/// use runtime::memory::is_sole_owner;
/// use tch::{Tensor, kind};
///
/// let buffer = Tensor::zeros([4], kind::FLOAT_CPU);
/// assert!(is_sole_owner(&buffer)?);
/// let view = buffer.narrow(0, 1, 2);
/// assert!(!is_sole_owner(&buffer)?);
/// # drop(view);
/// # Ok::<(), runtime::Error>(())
/// ```
pub fn is_sole_owner(tensor: &Tensor) -> Result<bool> {
    crate::sys::tensor::is_sole_owner(tensor)
}

/// Returns the number of the tensor's handles: those of callers, of graphs, and this one. Views of its memory are other tensors.
///
/// # Errors
/// Never fails; `Result` for uniformity.
pub fn use_count(tensor: &Tensor) -> Result<usize> {
    crate::sys::tensor::use_count(tensor)
}

/// Returns the bytes of live tensors on `device`. On the CPU the first call starts to count ([`track_cpu`]), which keeps no memory.
///
/// # Errors
/// A device whose allocator is not counted; CUDA that is unavailable.
pub fn live_bytes(device: Device) -> Result<u64> {
    Ok(unsigned(sys::live(counted(device)?)?))
}

/// Starts counting on the CPU, for a program that wants its first tensors in the figures. Otherwise counting starts
/// with the first call of this module. It costs a header of 64 bytes for each tensor.
///
/// # Errors
/// Another library has installed its own allocator in libtorch, which cannot be counted.
pub fn track_cpu() -> Result<()> {
    sys::install_cpu_tracking()
}

/// Sets whether large CPU tensors (from 4 MiB) request huge pages from the kernel; on by default once counting has
/// started. Returns the previous setting.
///
/// # Errors
/// Never fails; `Result` for uniformity.
pub fn set_huge_pages(enabled: bool) -> Result<bool> {
    sys::set_huge_pages(enabled)
}

/// Sets whether freed large CPU tensors (from 256 KiB) are cached for the next ones of exactly their size once counting has started; off by
/// default. Returns the previous setting; switching it off frees the cached blocks, as [`empty_cache`] does between two pieces of work.
///
/// The system reclaims freed memory page by page and zeroes it before reuse, which can cost more than the operator that fills it.
/// Live and cached bytes together never exceed the maximum that was ever live, so the process does not become larger, unless there is
/// [slack](set_cache_slack). Cached blocks are not live, and no figure of this module counts them.
///
/// # Errors
/// Never fails; `Result` for uniformity.
pub fn set_block_cache(enabled: bool) -> Result<bool> {
    sys::set_block_cache(enabled)
}

/// Sets by how many per cent live and cached bytes together may exceed the maximum that was ever live; 0 at first. Returns the previous
/// setting. A [`limit`] holds nevertheless.
///
/// In a training that updates all weights, gradients take the place of activations in each step. Without slack, blocks of one are
/// unmapped for those of the other, and the kernel clears their pages again.
///
/// # Errors
/// Never fails; `Result` for uniformity.
pub fn set_cache_slack(percent: u8) -> Result<u8> {
    sys::set_cache_slack(percent)
}

/// Returns the bytes that the allocator of `device` caches.
///
/// # Errors
/// As [`live_bytes`].
pub fn cached_bytes(device: Device) -> Result<u64> {
    Ok(unsigned(sys::cached(counted(device)?)?))
}

/// Returns cached blocks of `device` to the system.
///
/// # Errors
/// CUDA that is unavailable.
pub fn empty_cache(device: Device) -> Result<()> {
    match counted(device)? {
        None => sys::empty_cpu_cache(),
        Some(_) => sys::empty_cuda_cache(),
    }
}

/// Measures the peak of a region of code. Regions may nest and overlap, on any threads: each counts the whole process's
/// tensors between its start and finish.
#[derive(Debug)]
#[must_use = "a region measures until `finish`"]
pub struct Region {
    device: Device,
    id: u64,
    live_before: u64,
}

impl Region {
    /// Starts a region on `device`.
    ///
    /// # Errors
    /// As [`live_bytes`].
    pub fn start(device: Device) -> Result<Self> {
        let cuda = counted(device)?;
        let mut registry = registry();
        registry.fold(cuda)?;
        let live_before = unsigned(sys::live(cuda)?);
        let id = registry.next;
        registry.next += 1;
        registry.open.insert(id, Open { cuda, peak: live_before });
        Ok(Self { device, id, live_before })
    }

    /// Ends the region.
    ///
    /// # Errors
    /// As [`live_bytes`].
    pub fn finish(self) -> Result<RegionUsage> {
        let cuda = counted(self.device)?;
        let mut registry = registry();
        registry.fold(cuda)?;
        let live_after = unsigned(sys::live(cuda)?);
        let peak = registry.open.remove(&self.id).map_or(live_after, |open| open.peak);
        Ok(RegionUsage {
            live_before: self.live_before,
            live_after,
            peak: peak.max(self.live_before).max(live_after),
        })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        registry().open.remove(&self.id);
    }
}

/// A device has one running peak. Whenever a region starts or ends, it is read and merged into every open region, so
/// that each region's peak is the maximum over the intervals in which it was open.
#[derive(Default)]
struct Registry {
    next: u64,
    open: BTreeMap<u64, Open>,
}

struct Open {
    cuda: Option<i32>,
    peak: u64,
}

impl Registry {
    fn fold(&mut self, cuda: Option<i32>) -> Result<()> {
        let peak = unsigned(sys::take_peak(cuda)?);
        for open in self.open.values_mut().filter(|open| open.cuda == cuda) {
            open.peak = open.peak.max(peak);
        }
        Ok(())
    }
}

fn registry() -> MutexGuard<'static, Registry> {
    static REGISTRY: Mutex<Registry> = Mutex::new(Registry { next: 0, open: BTreeMap::new() });
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the CUDA index of a device whose bytes are counted, `None` for the CPU.
fn counted(device: Device) -> Result<Option<i32>> {
    let cuda = crate::device::checked(device)?;
    if cuda.is_none() {
        sys::install_cpu_tracking()?;
    }
    Ok(cuda)
}

/// The shim's counters are signed but never negative: a block is subtracted only if it was added.
fn unsigned(bytes: i64) -> u64 {
    u64::try_from(bytes).unwrap_or(0)
}
