//! Named ranges of a trace.

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

/// Names what happens on this thread until the guard is dropped, in the [`Trace`](super::Trace) that runs; costs about
/// fifteen nanoseconds when none does.
///
/// Kineto writes ASCII names only: another character becomes `?`, a double quote `'` and a backslash `/`.
///
/// Ranges nest; drop the inner one first, as scopes do. A trace that starts within a range does not have the range.
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
