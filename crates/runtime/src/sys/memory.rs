//! Bytes of the device allocators (`cpp/memory.cpp`).

use std::ffi::c_int;

use super::{Status, check};
use crate::error::Result;

unsafe extern "C" {
    fn rt_cpu_tracking_install() -> Status;
    fn rt_cpu_live(live: *mut i64, allocations: *mut i64) -> Status;
    fn rt_cpu_take_peak(peak: *mut i64) -> Status;
    fn rt_cpu_huge_pages(enabled: c_int, previous: *mut c_int) -> Status;
    fn rt_cuda_live(index: c_int, live: *mut i64, allocations: *mut i64) -> Status;
    fn rt_cuda_take_peak(index: c_int, peak: *mut i64) -> Status;
    fn rt_cuda_empty_cache() -> Status;
}

/// Starts counting on the CPU; later calls do nothing.
pub(crate) fn install_cpu_tracking() -> Result<()> {
    // SAFETY: the function has no arguments and may be called from any thread.
    unsafe { check(rt_cpu_tracking_install()) }
}

/// Live bytes, and allocations so far.
pub(crate) fn live(cuda: Option<i32>) -> Result<(i64, i64)> {
    let (mut live, mut allocations) = (0, 0);
    // SAFETY: the out-parameters outlive the call.
    unsafe {
        check(match cuda {
            None => rt_cpu_live(&mut live, &mut allocations),
            Some(index) => rt_cuda_live(index, &mut live, &mut allocations),
        })
    }?;
    Ok((live, allocations))
}

/// The peak since the last call; a new one starts at what is live.
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

/// Whether large CPU blocks ask for huge pages; returns what it was.
pub(crate) fn set_huge_pages(enabled: bool) -> Result<bool> {
    let mut previous = 0;
    // SAFETY: the out-parameter outlives the call.
    unsafe { check(rt_cpu_huge_pages(enabled.into(), &mut previous)) }?;
    Ok(previous != 0)
}

/// Gives CUDA's cached blocks back to the driver.
pub(crate) fn empty_cuda_cache() -> Result<()> {
    // SAFETY: the function has no arguments.
    unsafe { check(rt_cuda_empty_cache()) }
}
