//! Kernels written in Rust on libtorch's own threads (`cpp/parallel.cpp`).
//!
//! A second pool would share the processor with libtorch's threads, which spin for a while after each operator.

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Status, check};
use crate::error::Result;

unsafe extern "C" {
    fn rt_parallel(workers: i64, work: extern "C" fn(*mut c_void, i64), context: *mut c_void) -> Status;
}

/// Runs `work(task)` for each task below `tasks`, on as many threads as libtorch uses. A thread takes the next task when its
/// last one is done, so the assignment differs from run to run: results must not depend on it.
///
/// `work` must not panic: a panic on a worker's stack aborts the process.
pub(crate) fn for_each<W: Fn(usize) + Sync>(tasks: usize, work: W) -> Result<()> {
    let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1).min(tasks);
    if threads < 2 {
        (0..tasks).for_each(work);
        return Ok(());
    }
    let shared = Shared { work, tasks, next: AtomicUsize::new(0) };
    let context = std::ptr::from_ref(&shared).cast_mut().cast();
    // SAFETY: the context is a `Shared<W>`, as `worker::<W>` takes it, and outlives the call, which returns when all
    // workers have.
    unsafe { check(rt_parallel(threads as i64, worker::<W>, context)) }
}

/// Returns the results of `work` for each task below `tasks`, in their order; see [`for_each`].
pub(crate) fn map<T: Send + Sync, W: Fn(usize) -> T + Sync>(tasks: usize, work: W) -> Result<Vec<T>> {
    let results: Vec<OnceLock<T>> = std::iter::repeat_with(OnceLock::new).take(tasks).collect();
    for_each(tasks, |task| {
        let _ = results[task].set(work(task));
    })?;
    Ok(results.into_iter().filter_map(OnceLock::into_inner).collect())
}

struct Shared<W> {
    work: W,
    tasks: usize,
    next: AtomicUsize,
}

/// The function that C++ calls. Unwinding out of an `extern "C"` function aborts the process.
extern "C" fn worker<W: Fn(usize) + Sync>(context: *mut c_void, _: i64) {
    // SAFETY: `for_each` gives a `Shared<W>` that lives until all workers have returned, and only shares it.
    let shared = unsafe { &*context.cast::<Shared<W>>() };
    loop {
        let task = shared.next.fetch_add(1, Ordering::Relaxed);
        if task >= shared.tasks {
            return;
        }
        (shared.work)(task);
    }
}
