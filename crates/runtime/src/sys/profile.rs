//! Traces, named ranges, and the counter of dispatched work.

use std::ffi::{CString, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;
use std::slice;
use std::sync::atomic::{AtomicUsize, Ordering};

use tch::Tensor;
use torch_sys::C_tensor;

use super::{Status, callback, check};
use crate::error::{Error, Result};

#[repr(C)]
struct RawResult {
    opaque: [u8; 0],
}

#[repr(C)]
struct RawRange {
    opaque: [u8; 0],
}

#[repr(C)]
struct RawCounter {
    opaque: [u8; 0],
}

/// `rt_work` of counter.cpp.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawWork {
    pub(crate) calls: u64,
    pub(crate) dense: u64,
    pub(crate) causal: u64,
    pub(crate) bytes: u64,
}

/// `rt_row` of counter.cpp.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawRow {
    pub(crate) total: RawWork,
    pub(crate) recomputed: RawWork,
    pub(crate) unknown: i32,
}

type VisitRow = extern "C" fn(*mut c_void, *const c_char, usize, *const RawRow) -> Status;

unsafe extern "C" {
    fn rt_trace_start(cuda: c_int, shapes: c_int, memory: c_int) -> Status;
    fn rt_trace_stop(result: *mut *mut RawResult) -> Status;
    fn rt_trace_save(result: *mut RawResult, path: *const c_char) -> Status;
    fn rt_trace_free(result: *mut RawResult);
    fn rt_range_begin(name: *const c_char, size: usize, range: *mut *mut RawRange) -> Status;
    fn rt_kernel_begin(
        name: *const c_char,
        size: usize,
        inputs: *const *const C_tensor,
        count: usize,
        range: *mut *mut RawRange,
    ) -> Status;
    fn rt_range_end(range: *mut RawRange) -> Status;
    fn rt_counter_start(this_thread: c_int, counter: *mut *mut RawCounter) -> Status;
    fn rt_counter_stop(counter: *mut RawCounter) -> Status;
    fn rt_counter_rows(counter: *const RawCounter, visit: VisitRow, context: *mut c_void) -> Status;
    fn rt_counter_record(name: *const c_char, size: usize, dense: u64, causal: u64, bytes: u64) -> Status;
    fn rt_recompute(change: c_int);
    static rt_running_counters: AtomicUsize;
}

/// Keeps a type on the thread that made it.
type OnThisThread = PhantomData<*const ()>;

pub(crate) fn start_trace(cuda: bool, shapes: bool, memory: bool) -> Result<()> {
    let [cuda, shapes, memory] = [cuda, shapes, memory].map(c_int::from);
    // SAFETY: a plain call; the status is fresh.
    unsafe { check(rt_trace_start(cuda, shapes, memory)) }
}

/// A recorded trace.
pub(crate) struct TraceResult(*mut RawResult);

pub(crate) fn stop_trace() -> Result<TraceResult> {
    let mut result = null_mut();
    // SAFETY: `result` is written on success; the status is fresh.
    unsafe { check(rt_trace_stop(&raw mut result))? };
    Ok(TraceResult(result))
}

impl TraceResult {
    pub(crate) fn save(&self, path: &Path) -> Result<()> {
        let text = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| Error::invalid("Trace::save", format!("{path:?} has a NUL character in it")))?;
        // SAFETY: both pointers are live during the call; the status is fresh.
        unsafe { check(rt_trace_save(self.0, text.as_ptr())) }
    }
}

impl Drop for TraceResult {
    fn drop(&mut self) {
        // SAFETY: the result is ours and not used after this.
        unsafe { rt_trace_free(self.0) }
    }
}

/// An open range, or the scope of a kernel; null when nothing recorded at its beginning.
pub(crate) struct Range(*mut RawRange, OnThisThread);

pub(crate) fn begin_range(name: &str) -> Range {
    let mut range = null_mut();
    // SAFETY: the name is read during the call; the status is fresh. A range that cannot be opened is not recorded.
    let _ = unsafe { check(rt_range_begin(name.as_ptr().cast(), name.len(), &raw mut range)) };
    Range(range, PhantomData)
}

pub(crate) fn begin_kernel<const N: usize>(name: &str, inputs: [&Tensor; N]) -> Range {
    let mut range = null_mut();
    let inputs = inputs.map(Tensor::as_ptr);
    let name = (name.as_ptr().cast(), name.len());
    // SAFETY: the name and the inputs are read during the call; the status is fresh. A scope that cannot be opened is not recorded.
    let _ = unsafe { check(rt_kernel_begin(name.0, name.1, inputs.as_ptr().cast(), N, &raw mut range)) };
    Range(range, PhantomData)
}

impl Drop for Range {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the range is ours, on the thread that opened it as `Range` is not `Send`, and not used after this.
            let _ = unsafe { check(rt_range_end(self.0)) };
        }
    }
}

/// A running counter.
pub(crate) struct Counter(*mut RawCounter, OnThisThread);

pub(crate) fn start_counter(this_thread: bool) -> Result<Counter> {
    let mut counter = null_mut();
    // SAFETY: `counter` is written on success; the status is fresh.
    unsafe { check(rt_counter_start(c_int::from(this_thread), &raw mut counter))? };
    Ok(Counter(counter, PhantomData))
}

impl Counter {
    pub(crate) fn rows(&self) -> Result<Vec<(String, RawRow)>> {
        let mut rows: Vec<(String, RawRow)> = Vec::new();
        // SAFETY: the counter is live, and `push_row` gets its context back during this call only.
        unsafe { check(rt_counter_rows(self.0, push_row, (&raw mut rows).cast()))? };
        Ok(rows)
    }
}

extern "C" fn push_row(context: *mut c_void, name: *const c_char, size: usize, row: *const RawRow) -> Status {
    callback(|| {
        // SAFETY: `context` is the vector of `Counter::rows`, which no other code uses during the call.
        let rows = unsafe { &mut *context.cast::<Vec<(String, RawRow)>>() };
        // SAFETY: C++ gives `size` bytes that are valid during this call.
        let name = unsafe { slice::from_raw_parts(name.cast::<u8>(), size) };
        // SAFETY: C++ gives a row that is valid during this call.
        let row = unsafe { *row };
        rows.push((String::from_utf8_lossy(name).into_owned(), row));
        Ok(())
    })
}

impl Drop for Counter {
    fn drop(&mut self) {
        // SAFETY: the counter is ours, on the thread that started it as `Counter` is not `Send`, and not used after this.
        let _ = unsafe { check(rt_counter_stop(self.0)) };
    }
}

/// Returns whether a counter runs.
pub(crate) fn is_counting() -> bool {
    // SAFETY: a `std::atomic<size_t>` of the shim, which has the layout of an `AtomicUsize` and lives as long as the process.
    unsafe { rt_running_counters.load(Ordering::Relaxed) > 0 }
}

pub(crate) fn record(name: &str, dense: u64, causal: u64, bytes: u64) -> Result<()> {
    // SAFETY: the name is read during the call; the status is fresh.
    unsafe { check(rt_counter_record(name.as_ptr().cast(), name.len(), dense, causal, bytes)) }
}

/// While one of these exists, its thread's work counts as recomputed.
pub(crate) struct Recompute(OnThisThread);

pub(crate) fn recompute() -> Recompute {
    // SAFETY: changes a number of this thread.
    unsafe { rt_recompute(1) };
    Recompute(PhantomData)
}

impl Drop for Recompute {
    fn drop(&mut self) {
        // SAFETY: changes a number of this thread, the one that raised it as `Recompute` is not `Send`.
        unsafe { rt_recompute(-1) };
    }
}
