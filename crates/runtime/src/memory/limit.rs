//! A limit on the bytes of tensors.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::Device;

use super::counted;
use crate::error::{Error, Result};
use crate::sys::memory as sys;

/// A guard that limits the live bytes of tensors; see [`limit`].
#[derive(Debug)]
#[must_use = "the limit holds until this is dropped"]
pub struct Limit {
    id: u64,
    bytes: u64,
}

/// Limits the live bytes of tensors on `device`, on all threads, until the [`Limit`] is dropped. Of several limits the
/// lowest applies.
///
/// An allocation beyond it fails with libtorch's out-of-memory error and counts nothing, so that a program may free something and
/// try again. Bytes are those of [`super::live_bytes`]: cached blocks do not count against an allocation; they are freed if they do
/// not fit under the limit beside the live bytes. Memory that libtorch allocates for itself is not counted.
///
/// On CUDA libtorch 2.11 has no such call for a C++ program without CUDA's headers, only an environment variable that it reads at
/// start-up; the error names it.
///
/// ```
/// use runtime::memory;
/// use tch::{Device, Tensor, kind};
///
/// let limit = memory::limit(Device::Cpu, 1 << 20)?;
/// assert!(Tensor::f_zeros([1 << 20], kind::FLOAT_CPU).is_err());
/// drop(limit);
/// assert!(Tensor::f_zeros([1 << 20], kind::FLOAT_CPU).is_ok());
/// # Ok::<(), runtime::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] if more than `bytes` are live already; [`Error::Unavailable`] on CUDA; as [`super::live_bytes`].
pub fn limit(device: Device, bytes: u64) -> Result<Limit> {
    if counted(device)?.is_some() {
        return Err(cuda_remedy(bytes, crate::device::memory_info(device)?.total));
    }
    let mut limits = limits();
    let live = super::live_bytes(device)?;
    if live > bytes {
        let reason =
            format!("{live} bytes are live already, more than the limit of {bytes}; free tensors first");
        return Err(Error::invalid("memory limit", reason));
    }
    let id = limits.next;
    limits.next += 1;
    limits.open.insert(id, bytes);
    let limit = Limit { id, bytes };
    limits.apply()?;
    Ok(limit)
}

impl Limit {
    /// Returns the limit in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        let mut limits = limits();
        limits.open.remove(&self.id);
        // Fails only if a lock of the C++ library fails, and a drop cannot return an error.
        drop(limits.apply());
    }
}

/// Returns an error that says what to set instead. The fraction is rounded down, so that it never allows more.
fn cuda_remedy(bytes: u64, total: u64) -> Error {
    let fraction = (bytes.min(total) as f64 / total.max(1) as f64 * 1e4).floor() / 1e4;
    Error::Unavailable {
        what: "a memory limit on CUDA after the start of the program".into(),
        reason: format!(
            "libtorch takes one from the environment alone; for {bytes} of {total} bytes start the program with \
             PYTORCH_ALLOC_CONF=per_process_memory_fraction:{fraction}"
        ),
    }
}

/// The live limits.
#[derive(Default)]
struct Limits {
    next: u64,
    open: BTreeMap<u64, u64>,
}

impl Limits {
    fn apply(&self) -> Result<()> {
        let tightest = self.open.values().min();
        sys::set_limit(tightest.map(|&bytes| i64::try_from(bytes).unwrap_or(i64::MAX)))
    }
}

fn limits() -> MutexGuard<'static, Limits> {
    static LIMITS: Mutex<Limits> = Mutex::new(Limits { next: 0, open: BTreeMap::new() });
    LIMITS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    #[test]
    fn the_remedy_for_cuda_never_exceeds_the_limit() {
        let error = cuda_remedy(10 << 30, 80_000_000_000);
        expect!["a memory limit on CUDA after the start of the program is not available here: libtorch takes one from the environment alone; for 10737418240 of 80000000000 bytes start the program with PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.1342"]
            .assert_eq(&error.to_string());
        assert!(cuda_remedy(9, 5).to_string().ends_with("fraction:1"));
    }
}
