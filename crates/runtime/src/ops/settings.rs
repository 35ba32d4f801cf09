//! Process-wide settings of operators.

use crate::error::{Error, Result};
use crate::sys::ops as sys;

/// Returns how many threads a CPU operator may use.
///
/// # Errors
/// [`Error::Torch`] if libtorch fails.
pub fn num_threads() -> Result<usize> {
    Ok(usize::try_from(sys::num_threads()?).unwrap_or(1))
}

/// Sets how many threads a CPU operator may use.
///
/// # Errors
/// [`Error::Invalid`] for 0 and for an impossible number.
pub fn set_num_threads(count: usize) -> Result<()> {
    match i32::try_from(count) {
        Ok(number @ 1..) => sys::set_num_threads(number),
        _ => Err(Error::invalid("set_num_threads", format!("{count} threads; expected 1 or more"))),
    }
}

/// Handling of nondeterministic operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Determinism {
    /// Use the fastest kernel.
    Off,
    /// Use a deterministic kernel, or warn.
    Warn,
    /// Use a deterministic kernel, or return an error.
    Require,
}

/// Selects deterministic kernels. CUDA's matrix products also need `CUBLAS_WORKSPACE_CONFIG=:4096:8` in the
/// environment, before the first of them.
///
/// # Errors
/// [`Error::Torch`] if libtorch refuses.
pub fn set_determinism(determinism: Determinism) -> Result<()> {
    sys::set_deterministic(determinism != Determinism::Off, determinism == Determinism::Warn)
}

/// Returns whether deterministic kernels are asked for.
///
/// # Errors
/// [`Error::Torch`] if libtorch fails.
pub fn is_deterministic() -> Result<bool> {
    sys::deterministic()
}
