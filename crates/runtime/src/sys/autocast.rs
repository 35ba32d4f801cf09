//! The thread-local state of libtorch's own autocast (`cpp/autocast.cpp`).

use std::ffi::c_int;
use std::marker::PhantomData;

use super::{Status, check};
use crate::error::Result;

unsafe extern "C" {
    fn rt_autocast_get(enabled: *mut c_int, dtype: *mut c_int) -> Status;
    fn rt_autocast_set(enabled: *const c_int, dtype: *const c_int) -> Status;
}

/// A thread's autocast state, for CPU and CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Autocast {
    enabled: [c_int; 2],
    dtype: [c_int; 2],
}

impl Autocast {
    /// Captures this thread's state.
    pub(crate) fn capture() -> Result<Self> {
        let mut state = Self { enabled: [0; 2], dtype: [0; 2] };
        // SAFETY: both arrays have the two entries that the shim writes.
        unsafe { check(rt_autocast_get(state.enabled.as_mut_ptr(), state.dtype.as_mut_ptr())) }?;
        Ok(state)
    }

    /// Autocast to bf16 on the CPU, off elsewhere.
    #[cfg(test)]
    pub(crate) fn cpu_bf16() -> Self {
        /// c10::ScalarType::BFloat16
        const BF16: c_int = 15;
        Self { enabled: [1, 0], dtype: [BF16, BF16] }
    }

    fn set(&self) -> Result<()> {
        // SAFETY: both arrays have the two entries that the shim reads.
        unsafe { check(rt_autocast_set(self.enabled.as_ptr(), self.dtype.as_ptr())) }
    }

    /// Applies this state to the thread until the guard is dropped.
    pub(crate) fn enter(&self) -> Result<AutocastGuard> {
        let guard = AutocastGuard { previous: Self::capture()?, _thread: PhantomData };
        self.set()?;
        Ok(guard)
    }
}

/// Restores the thread's previous state when dropped.
#[derive(Debug)]
pub(crate) struct AutocastGuard {
    previous: Autocast,
    _thread: PhantomData<*const ()>,
}

impl Drop for AutocastGuard {
    fn drop(&mut self) {
        // Restoring the thread's own previous state does not fail.
        let _ = self.previous.set();
    }
}
