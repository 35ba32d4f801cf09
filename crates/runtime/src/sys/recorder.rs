//! Recordings of operators (`cpp/recorder.cpp`).

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::ptr::null_mut;

use super::{Status, check};
use crate::error::{Error, Result};

/// An opaque object of the shim.
#[repr(C)]
struct Opaque {
    _private: [u8; 0],
}

unsafe extern "C" {
    fn rt_recording_new(out: *mut *mut Opaque) -> Status;
    fn rt_recording_free(recording: *mut Opaque);
    fn rt_recording_begin(recording: *mut Opaque) -> Status;
    safe fn rt_recording_end();
    fn rt_recording_size(recording: *const Opaque) -> u64;
    fn rt_recording_compare(first: *const Opaque, second: *const Opaque) -> Status;
    fn rt_recording_replay(recording: *mut Opaque) -> Status;
}

thread_local! {
    static RECORDING: Cell<bool> = const { Cell::new(false) };
    /// The kernel whose scope was opened last while this thread records.
    static KERNEL: RefCell<String> = const { RefCell::new(String::new()) };
}

/// The operators of one run of a step. Stays on the thread that made it.
#[derive(Debug)]
pub(crate) struct Recording {
    recording: *mut Opaque,
    _thread: PhantomData<*mut ()>,
}

/// Records this thread's operators until it is dropped.
struct Guard<'a>(PhantomData<&'a mut Recording>);

impl Recording {
    pub(crate) fn new() -> Result<Self> {
        let mut recording = null_mut();
        // SAFETY: the out-parameter is valid during the call.
        unsafe { check(rt_recording_new(&raw mut recording)) }?;
        Ok(Self { recording, _thread: PhantomData })
    }

    /// Runs `body` and records its operators.
    pub(crate) fn record<T, E: From<Error>>(&mut self, body: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let _guard = self.begin()?;
        body()
    }

    fn begin(&mut self) -> Result<Guard<'_>> {
        // SAFETY: the recording is ours, and the guard, which ends it, borrows it.
        unsafe { check(rt_recording_begin(self.recording)) }?;
        RECORDING.set(true);
        Ok(Guard(PhantomData))
    }

    /// Returns the number of operators.
    pub(crate) fn operators(&self) -> u64 {
        // SAFETY: the recording is ours.
        unsafe { rt_recording_size(self.recording) }
    }

    /// Refuses another run of the same step that differs in more than the content of tensors.
    pub(crate) fn compare(&self, next: &Self) -> Result<()> {
        // SAFETY: both are recordings that exist during the call.
        unsafe { check(rt_recording_compare(self.recording, next.recording)) }
    }

    pub(crate) fn replay(&mut self) -> Result<()> {
        // SAFETY: the recording is ours.
        unsafe { check(rt_recording_replay(self.recording)) }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // SAFETY: the recording is ours, freed once, and has ended with its guard.
        unsafe { rt_recording_free(self.recording) };
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        RECORDING.set(false);
        rt_recording_end();
    }
}

/// Returns whether this thread records.
pub(crate) fn is_recording() -> bool {
    RECORDING.get()
}

/// Notes which kernel begins, for the error of [`refuse`].
pub(crate) fn note_kernel(name: &str) {
    if is_recording() {
        KERNEL.with_borrow_mut(|kernel| name.clone_into(kernel));
    }
}

/// Refuses work outside the dispatcher while this thread records, because a replay would not repeat it.
pub(crate) fn refuse(work: &str) -> Result<()> {
    if !is_recording() {
        return Ok(());
    }
    let kernel = KERNEL.with_borrow(|kernel| match kernel.as_str() {
        "" => String::new(),
        kernel => format!(" (the kernel that began last: `{kernel}`)"),
    });
    Err(Error::invalid("captured step", format!("{work}{kernel}, which a recording cannot repeat")))
}
