//! Bytes of the device allocators (`cpp/memory.cpp`).

use std::ffi::c_int;

use super::{Status, check};
use crate::error::Result;

unsafe extern "C" {
    fn rt_cpu_tracking_install() -> Status;
    fn rt_cpu_live(live: *mut i64) -> Status;
    fn rt_cpu_take_peak(peak: *mut i64) -> Status;
    fn rt_cpu_limit(bytes: i64) -> Status;
    fn rt_cpu_fail_allocations(first: i64, end: i64) -> Status;
    fn rt_cpu_failed_allocations(seen: *mut i64, failed: *mut i64) -> Status;
    fn rt_cpu_huge_pages(enabled: c_int, previous: *mut c_int) -> Status;
    fn rt_cpu_block_cache(enabled: c_int, previous: *mut c_int) -> Status;
    fn rt_cpu_cache_slack(percent: i64, previous: *mut i64) -> Status;
    fn rt_cpu_cached(bytes: *mut i64) -> Status;
    fn rt_cuda_cached(index: c_int, bytes: *mut i64) -> Status;
    fn rt_cpu_empty_cache() -> Status;
    fn rt_cuda_live(index: c_int, live: *mut i64) -> Status;
    fn rt_cuda_take_peak(index: c_int, peak: *mut i64) -> Status;
    fn rt_cuda_empty_cache() -> Status;
}

/// Starts counting on the CPU; later calls do nothing.
pub(crate) fn install_cpu_tracking() -> Result<()> {
    // SAFETY: the function has no arguments and may be called from any thread.
    unsafe { check(rt_cpu_tracking_install()) }
}

/// Live bytes.
pub(crate) fn live(cuda: Option<i32>) -> Result<i64> {
    let mut live = 0;
    // SAFETY: the out-parameter outlives the call.
    unsafe {
        check(match cuda {
            None => rt_cpu_live(&mut live),
            Some(index) => rt_cuda_live(index, &mut live),
        })
    }?;
    Ok(live)
}

/// The peak since the last call; the next peak starts at the live bytes.
pub(crate) fn take_peak(cuda: Option<i32>) -> Result<i64> {
    let mut peak = 0;
    // SAFETY: the out-parameter outlives the call.
    unsafe {
        check(match cuda {
            None => rt_cpu_take_peak(&mut peak),
            Some(index) => rt_cuda_take_peak(index, &mut peak),
        })
    }?;
    Ok(peak)
}

/// Limits the live bytes on the CPU; `None` for no limit.
pub(crate) fn set_limit(bytes: Option<i64>) -> Result<()> {
    // SAFETY: plain data in.
    unsafe { check(rt_cpu_limit(bytes.unwrap_or(-1))) }
}

/// Makes the allocations numbered from `first` to before `end` fail, counted from this call; `None` ends it.
pub(crate) fn fail_allocations(range: Option<(i64, i64)>) -> Result<()> {
    let (first, end) = range.unwrap_or((-1, 0));
    // SAFETY: plain data in.
    unsafe { check(rt_cpu_fail_allocations(first, end)) }
}

/// How many allocations were numbered, and how many of them failed.
pub(crate) fn failed_allocations() -> Result<(i64, i64)> {
    let (mut seen, mut failed) = (0, 0);
    // SAFETY: the out-parameters outlive the call.
    unsafe { check(rt_cpu_failed_allocations(&mut seen, &mut failed)) }?;
    Ok((seen, failed))
}

/// Sets whether large CPU blocks request huge pages; returns the previous setting.
pub(crate) fn set_huge_pages(enabled: bool) -> Result<bool> {
    let mut previous = 0;
    // SAFETY: the out-parameter outlives the call.
    unsafe { check(rt_cpu_huge_pages(enabled.into(), &mut previous)) }?;
    Ok(previous != 0)
}

/// Sets whether freed large CPU blocks are cached; returns the previous setting.
pub(crate) fn set_block_cache(enabled: bool) -> Result<bool> {
    let mut previous = 0;
    // SAFETY: the out-parameter outlives the call.
    unsafe { check(rt_cpu_block_cache(enabled.into(), &mut previous)) }?;
    Ok(previous != 0)
}

/// Sets by how many per cent of the maximum of live bytes cached blocks may exceed it; returns the previous setting.
pub(crate) fn set_cache_slack(percent: u8) -> Result<u8> {
    let mut previous = 0;
    // SAFETY: the out-parameter outlives the call.
    unsafe { check(rt_cpu_cache_slack(percent.into(), &mut previous)) }?;
    Ok(u8::try_from(previous).unwrap_or(u8::MAX))
}

/// Bytes that the allocator caches.
pub(crate) fn cached(cuda: Option<i32>) -> Result<i64> {
    let mut bytes = 0;
    // SAFETY: the out-parameter outlives the call.
    unsafe {
        check(match cuda {
            None => rt_cpu_cached(&mut bytes),
            Some(index) => rt_cuda_cached(index, &mut bytes),
        })
    }?;
    Ok(bytes)
}

/// Frees cached CPU blocks.
pub(crate) fn empty_cpu_cache() -> Result<()> {
    // SAFETY: the function has no arguments.
    unsafe { check(rt_cpu_empty_cache()) }
}

/// Frees CUDA's cached blocks, to the driver.
pub(crate) fn empty_cuda_cache() -> Result<()> {
    // SAFETY: the function has no arguments.
    unsafe { check(rt_cuda_empty_cache()) }
}
