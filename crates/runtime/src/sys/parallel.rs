//! Kernels written in Rust on libtorch's own threads (`cpp/parallel.cpp`).
//!
//! A second pool would share the processor with libtorch's threads, which spin for a while after each operator.

use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::{Status, check, panic_message};
use crate::error::{Error, Result};

unsafe extern "C" {
    fn rt_parallel(workers: i64, work: extern "C" fn(*mut c_void, i64), context: *mut c_void) -> Status;
}

/// Runs `work(task)` for each task below `tasks`, on as many threads as libtorch uses. A thread takes the next task when its
/// last one is done, so the assignment differs from run to run: results must not depend on it.
///
/// # Errors
/// A panic of `work`, the first one; the tasks that have not begun by then are left out. It cannot unwind through libtorch's threads.
/// A thread that records a step ([`crate::device::graph::Capture::recorder`]).
pub fn for_each<W: Fn(usize) + Sync>(tasks: usize, work: W) -> Result<()> {
    super::recorder::refuse("a kernel computes outside libtorch's dispatcher")?;
    let threads =
        if tasks < 2 { tasks } else { usize::try_from(tch::get_num_threads()).unwrap_or(1).min(tasks) };
    let shared = Shared { work, tasks, next: AtomicUsize::new(0), panic: Mutex::new(None) };
    if threads < 2 {
        shared.run();
    } else {
        let context = std::ptr::from_ref(&shared).cast_mut().cast();
        // SAFETY: the context is a `Shared<W>`, as `worker::<W>` takes it, and outlives the call, which returns when all
        // workers have.
        unsafe { check(rt_parallel(threads as i64, worker::<W>, context)) }?;
    }
    match shared.panic.into_inner() {
        None => Ok(()),
        Some(panic) => Err(Error::Other(format!("a kernel panicked: {}", panic_message(&*panic)).into())),
    }
}

/// Returns the results of `work` for each task below `tasks`, in their order; see [`for_each`].
///
/// # Errors
/// As [`for_each`].
pub fn map<T: Send + Sync, W: Fn(usize) -> T + Sync>(tasks: usize, work: W) -> Result<Vec<T>> {
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
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl<W: Fn(usize) + Sync> Shared<W> {
    /// Runs tasks on this thread until none is left.
    fn run(&self) {
        let tasks = || {
            loop {
                let task = self.next.fetch_add(1, Ordering::Relaxed);
                if task >= self.tasks {
                    return;
                }
                (self.work)(task);
            }
        };
        // What the work may have left half done is an output, and the caller gets an error for it.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(tasks)) {
            self.next.store(self.tasks, Ordering::Relaxed);
            self.panic.lock().get_or_insert(panic);
        }
    }
}

/// The function that C++ calls. It does not unwind.
extern "C" fn worker<W: Fn(usize) + Sync>(context: *mut c_void, _: i64) {
    // SAFETY: `for_each` gives a `Shared<W>` that lives until all workers have returned, and only shares it.
    let shared = unsafe { &*context.cast::<Shared<W>>() };
    shared.run();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_in_a_task_is_an_error() {
        let before = tch::get_num_threads();
        for threads in [1, 4] {
            tch::set_num_threads(threads);
            let done = AtomicUsize::new(0);
            let result = for_each(100, |task| {
                assert!(task != 37, "task {task} is wrong");
                done.fetch_add(1, Ordering::Relaxed);
            });
            let error = result.unwrap_err().to_string();
            assert_eq!(error, "a kernel panicked: task 37 is wrong");
            assert!(done.into_inner() < 100);
            // The threads serve the next call.
            assert_eq!(map(100, |task| task).unwrap(), (0..100).collect::<Vec<_>>());
        }
        tch::set_num_threads(before);
    }
}
