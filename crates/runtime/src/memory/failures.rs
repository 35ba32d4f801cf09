//! Allocations that fail on request.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use tch::Device;

use super::counted;
use crate::error::{Error, Result};
use crate::sys::memory as sys;

/// Whether a [`FailedAllocations`] exists: the process has one counter.
static IN_USE: AtomicBool = AtomicBool::new(false);

/// A guard during which allocations fail; see [`fail_allocations`].
#[derive(Debug)]
#[must_use = "allocations fail until this is dropped"]
pub struct FailedAllocations(());

/// Makes allocations of tensors on the CPU fail, on all threads, until the [`FailedAllocations`] is dropped: those whose number, counted
/// from 0 at this call, is in `numbers`. A test that runs a piece of code with `n..n + 1` for every `n` shows what it does when memory
/// ends at any point.
///
/// The error is that of an exceeded [`limit`](super::limit). Tensors of at most 64 bytes, such as those in which libtorch wraps the numbers
/// that an operator gets, are neither counted nor refused.
///
/// ```
/// use runtime::memory;
/// use tch::{Tensor, kind};
///
/// let failures = memory::fail_allocations(1..2)?;
/// assert!(Tensor::f_zeros([100], kind::FLOAT_CPU).is_ok());
/// assert!(Tensor::f_zeros([100], kind::FLOAT_CPU).is_err());
/// assert!(Tensor::f_zeros([100], kind::FLOAT_CPU).is_ok());
/// assert_eq!((failures.seen()?, failures.failed()?), (3, 1));
/// # Ok::<(), runtime::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] while another guard exists; as [`super::live_bytes`].
pub fn fail_allocations(numbers: Range<u64>) -> Result<FailedAllocations> {
    counted(Device::Cpu)?;
    if IN_USE.swap(true, Ordering::AcqRel) {
        let reason = "another guard makes allocations fail already; drop it first";
        return Err(Error::invalid("fail_allocations", reason));
    }
    let guard = FailedAllocations(());
    let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    sys::fail_allocations(Some((number(numbers.start), number(numbers.end))))?;
    Ok(guard)
}

impl FailedAllocations {
    /// Returns how many allocations were counted.
    ///
    /// # Errors
    /// Never fails; `Result` for uniformity.
    pub fn seen(&self) -> Result<u64> {
        Ok(super::unsigned(sys::failed_allocations()?.0))
    }

    /// Returns how many of them failed.
    ///
    /// # Errors
    /// Never fails; `Result` for uniformity.
    pub fn failed(&self) -> Result<u64> {
        Ok(super::unsigned(sys::failed_allocations()?.1))
    }
}

impl Drop for FailedAllocations {
    fn drop(&mut self) {
        // Only stores to atomics.
        drop(sys::fail_allocations(None));
        IN_USE.store(false, Ordering::Release);
    }
}
