//! Named ranges of a trace, and the scopes of kernels that bypass the dispatcher.

use tch::Tensor;

use crate::sys::profile as sys;

/// A range of the trace, from [`range`] to the guard's drop, on one thread.
#[must_use = "the range ends at once when the guard is dropped at once"]
pub struct Range {
    _range: sys::Range,
}

impl std::fmt::Debug for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Range").finish_non_exhaustive()
    }
}

/// Adds a named range to the running [`Trace`](super::Trace), on this thread until the guard is dropped; costs about
/// fifteen nanoseconds without a trace.
///
/// Kineto writes ASCII names only: another character becomes `?`, a double quote `'` and a backslash `/`.
///
/// Ranges nest; drop the inner one first. A trace that starts within a range does not contain the range.
///
/// ```
/// let _step = runtime::profile::range("step");
/// {
///     let _forward = runtime::profile::range("forward");
/// }
/// ```
///
/// A guard stays on its thread:
///
/// ```compile_fail
/// let range = runtime::profile::range("step");
/// std::thread::spawn(move || drop(range));
/// ```
pub fn range(name: &str) -> Range {
    Range { _range: sys::begin_range(name) }
}

/// Shows this thread's work until the guard is dropped as one operator in the running [`Trace`](super::Trace). For kernels that
/// bypass the dispatcher, which report their work to counters with [`record_external`](super::record_external). A trace with shapes
/// shows those of `inputs`, and their dtypes.
///
/// ```
/// use runtime::profile::{Flops, kernel, record_external};
///
/// let x = tch::Tensor::zeros([64, 64], tch::kind::FLOAT_CPU);
/// let scope = kernel("my_kernel", [&x]);
/// // … computes
/// drop(scope);
/// record_external("my_kernel", Flops::from(2 * 64 * 64), 4 * 3 * 64)?;
/// # Ok::<(), runtime::Error>(())
/// ```
pub fn kernel<const N: usize>(name: &str, inputs: [&Tensor; N]) -> Range {
    crate::sys::recorder::note_kernel(name);
    Range { _range: sys::begin_kernel(name, inputs) }
}
