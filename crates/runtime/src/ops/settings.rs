//! Settings of the operators, for the whole process.

use crate::error::{Error, Result};
use crate::sys::ops as sys;

/// How many threads an operator on the CPU may use.
///
/// # Errors
/// [`Error::Torch`] where libtorch cannot say.
pub fn num_threads() -> Result<usize> {
    Ok(usize::try_from(sys::num_threads()?).unwrap_or(1))
}

/// Sets how many threads an operator on the CPU may use, from this thread on.
///
/// # Errors
/// [`Error::Invalid`] for 0 and for more than a machine can have.
pub fn set_num_threads(count: usize) -> Result<()> {
    match i32::try_from(count) {
        Ok(number @ 1..) => sys::set_num_threads(number),
        _ => Err(Error::invalid("set_num_threads", format!("{count} threads; expected 1 or more"))),
    }
}

/// What to do about an operator that gives different bits from run to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Determinism {
    /// Run the fastest kernel.
    Off,
    /// Run a deterministic kernel; where there is none, warn.
    Warn,
    /// Run a deterministic kernel; where there is none, that operator is an error.
    Require,
}

/// Asks for deterministic kernels. CUDA's matrix products need `CUBLAS_WORKSPACE_CONFIG=:4096:8` in the environment
/// besides, before the first of them.
///
/// # Errors
/// [`Error::Torch`] where libtorch refuses.
pub fn set_determinism(determinism: Determinism) -> Result<()> {
    sys::set_deterministic(determinism != Determinism::Off, determinism == Determinism::Warn)
}

/// Whether deterministic kernels are asked for.
///
/// # Errors
/// [`Error::Torch`] where libtorch cannot say.
pub fn is_deterministic() -> Result<bool> {
    sys::deterministic()
}
