//! Random generators (`cpp/random.cpp`).

use std::ffi::c_int;

use std::ptr::NonNull;

use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::{Status, check};
use crate::error::{Error, Result};

unsafe extern "C" {
    fn rt_random_seed(seed: u64) -> Status;
    fn rt_random_state(device: c_int, bytes: *mut u8, capacity: usize, size: *mut usize) -> Status;
    fn rt_random_restore(device: c_int, bytes: *const u8, size: usize) -> Status;
    fn rt_generator_new(seed: u64, generator: *mut *mut COwned) -> Status;
    fn rt_generator_free(generator: *mut COwned);
    fn rt_generator_normal(
        generator: *const COwned,
        tensor: *mut C_tensor,
        mean: f64,
        deviation: f64,
    ) -> Status;
    fn rt_generator_uniform(generator: *const COwned, tensor: *mut C_tensor, low: f64, high: f64) -> Status;
}

/// A generator of libtorch.
#[repr(C)]
struct COwned {
    _private: [u8; 0],
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

/// A separate generator.
pub(crate) struct Generator(NonNull<COwned>);

// SAFETY: the generator is independent of the thread that made it, and drawing takes `&mut`.
unsafe impl Send for Generator {}

impl Generator {
    pub(crate) fn new(seed: u64) -> Result<Self> {
        let mut generator = std::ptr::null_mut();
        // SAFETY: the out-parameter outlives the call; the status is fresh.
        unsafe { check(rt_generator_new(seed, &raw mut generator)) }?;
        NonNull::new(generator).map(Self).ok_or_else(|| Error::invalid("Generator", "no generator was made"))
    }

    pub(crate) fn normal(&mut self, tensor: &mut Tensor, mean: f64, deviation: f64) -> Result<()> {
        // SAFETY: both live during the call, nobody else draws meanwhile; the status is fresh.
        unsafe { check(rt_generator_normal(self.0.as_ptr(), tensor.as_mut_ptr(), mean, deviation)) }
    }

    pub(crate) fn uniform(&mut self, tensor: &mut Tensor, low: f64, high: f64) -> Result<()> {
        // SAFETY: both live during the call, nobody else draws meanwhile; the status is fresh.
        unsafe { check(rt_generator_uniform(self.0.as_ptr(), tensor.as_mut_ptr(), low, high)) }
    }
}

impl Drop for Generator {
    fn drop(&mut self) {
        // SAFETY: made by `rt_generator_new` and freed once.
        unsafe { rt_generator_free(self.0.as_ptr()) }
    }
}
