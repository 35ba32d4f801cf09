//! The default random generators.

use std::ffi::c_int;

use tch::Device;

use super::{Status, check};
use crate::error::Result;

unsafe extern "C" {
    fn rt_random_seed(seed: u64) -> Status;
    fn rt_random_state(device: c_int, bytes: *mut u8, capacity: usize, size: *mut usize) -> Status;
    fn rt_random_restore(device: c_int, bytes: *const u8, size: usize) -> Status;
}

fn number(device: Device) -> c_int {
    match device {
        Device::Cuda(index) => c_int::try_from(index).unwrap_or(c_int::MAX),
        _ => -1,
    }
}

pub(crate) fn seed(seed: u64) -> Result<()> {
    // SAFETY: a plain call; the status is fresh.
    unsafe { check(rt_random_seed(seed)) }
}

pub(crate) fn state(device: Device) -> Result<Vec<u8>> {
    // The CPU's Mersenne Twister has 5056 bytes, CUDA's Philox 16.
    let mut bytes = vec![0; 8192];
    loop {
        let mut size = 0;
        // SAFETY: at most `bytes.len()` bytes are written; the status is fresh.
        unsafe { check(rt_random_state(number(device), bytes.as_mut_ptr(), bytes.len(), &raw mut size))? };
        let whole = size <= bytes.len();
        bytes.resize(size, 0);
        if whole {
            return Ok(bytes);
        }
    }
}

pub(crate) fn restore(device: Device, bytes: &[u8]) -> Result<()> {
    // SAFETY: the bytes are read during the call only; the status is fresh.
    unsafe { check(rt_random_restore(number(device), bytes.as_ptr(), bytes.len())) }
}
