//! CUDA streams and events, and libtorch's thread-local state.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;

use tch::Tensor;
use torch_sys::C_tensor;

use super::{Status, check};
use crate::error::Result;

/// An opaque object of the shim.
#[repr(C)]
struct Opaque {
    _private: [u8; 0],
}

unsafe extern "C" {
    fn rt_stream_new(device: c_int, high_priority: c_int, id: *mut i64) -> Status;
    fn rt_stream_current(device: c_int, id: *mut i64) -> Status;
    fn rt_stream_query(device: c_int, id: i64, out: *mut c_int) -> Status;
    fn rt_stream_synchronize(device: c_int, id: i64) -> Status;
    fn rt_stream_native(device: c_int, id: i64, out: *mut *mut c_void) -> Status;
    fn rt_stream_enter(device: c_int, id: i64, out: *mut *mut Opaque) -> Status;
    fn rt_stream_leave(guard: *mut Opaque) -> Status;
    fn rt_stream_keep(device: c_int, id: i64, tensor: *const C_tensor) -> Status;

    fn rt_copy_async(target: *mut C_tensor, source: *const C_tensor) -> Status;

    fn rt_event_new(timed: c_int, out: *mut *mut Opaque) -> Status;
    fn rt_event_free(event: *mut Opaque);
    fn rt_event_record(event: *mut Opaque, device: c_int, id: i64) -> Status;
    fn rt_event_block(event: *const Opaque, device: c_int, id: i64) -> Status;
    fn rt_event_query(event: *const Opaque, out: *mut c_int) -> Status;
    fn rt_event_synchronize(event: *const Opaque) -> Status;
    fn rt_event_elapsed(start: *const Opaque, end: *const Opaque, out: *mut f64) -> Status;

    fn rt_thread_state_capture(out: *mut *mut Opaque) -> Status;
    fn rt_thread_state_free(state: *mut Opaque);
    fn rt_thread_state_enter(state: *const Opaque, out: *mut *mut Opaque) -> Status;
    fn rt_thread_state_leave(guard: *mut Opaque) -> Status;
}

/// A CUDA stream of libtorch's pool: plain data, valid as long as the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaStream {
    pub(crate) device: c_int,
    pub(crate) id: i64,
}

impl CudaStream {
    /// Returns the next stream of the pool. The caller has checked that the device exists.
    pub(crate) fn new(device: c_int, high_priority: bool) -> Result<Self> {
        let mut id = 0;
        // SAFETY: the out-parameter is valid during the call.
        unsafe { check(rt_stream_new(device, c_int::from(high_priority), &mut id)) }?;
        Ok(Self { device, id })
    }

    /// Returns the stream on which this thread enqueues.
    ///
    /// # Errors
    /// A device that does not exist.
    pub fn current(device: c_int) -> Result<Self> {
        let mut id = 0;
        // SAFETY: the out-parameter is valid during the call.
        unsafe { check(rt_stream_current(device, &mut id)) }?;
        Ok(Self { device, id })
    }

    /// Returns whether the stream's work is done.
    ///
    /// # Errors
    /// An error of its work.
    pub fn query(self) -> Result<bool> {
        let mut done: c_int = 0;
        // SAFETY: the id came from libtorch; the out-parameter is valid during the call.
        unsafe { check(rt_stream_query(self.device, self.id, &mut done)) }?;
        Ok(done != 0)
    }

    pub(crate) fn synchronize(self) -> Result<()> {
        // SAFETY: the id came from libtorch.
        unsafe { check(rt_stream_synchronize(self.device, self.id)) }
    }

    /// Keeps the allocator from reusing the memory of a CUDA or pinned tensor before the stream's current work is done.
    pub(crate) fn keep(self, tensor: &Tensor) -> Result<()> {
        // SAFETY: the id came from libtorch; the tensor is borrowed during the call.
        unsafe { check(rt_stream_keep(self.device, self.id, tensor.as_ptr())) }
    }

    /// Returns the stream's CUDA handle.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn native(self) -> Result<*mut c_void> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the id came from libtorch; the out-parameter is valid during the call.
        unsafe { check(rt_stream_native(self.device, self.id, &mut handle)) }?;
        Ok(handle)
    }

    /// Makes the stream current on this thread.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn enter(self) -> Result<CudaStreamGuard> {
        let mut guard = std::ptr::null_mut();
        // SAFETY: the id came from libtorch; the out-parameter is valid during the call.
        unsafe { check(rt_stream_enter(self.device, self.id, &mut guard)) }?;
        Ok(CudaStreamGuard { guard, _thread: PhantomData })
    }
}

/// Copies on the thread's current stream without waiting for the copy.
pub(crate) fn copy_async(target: &mut Tensor, source: &Tensor) -> Result<()> {
    // SAFETY: both tensors are borrowed during the call. The allocator does not reuse device memory before earlier work of its
    // stream is done, and libtorch records the use of pinned memory with its allocator.
    unsafe { check(rt_copy_async(target.as_mut_ptr(), source.as_ptr())) }
}

/// Restores the thread's former stream when dropped.
#[derive(Debug)]
pub struct CudaStreamGuard {
    guard: *mut Opaque,
    /// Not `Send`: it restores the state of the thread that made it.
    _thread: PhantomData<*mut ()>,
}

impl Drop for CudaStreamGuard {
    fn drop(&mut self) {
        // SAFETY: the guard is ours, is left once, and on its own thread because this type is not `Send`.
        let restored = unsafe { check(rt_stream_leave(self.guard)) };
        // The former stream was valid, so this does not fail; an error could not be returned.
        drop(restored);
    }
}

/// A CUDA event. Recording takes `&mut`; everything else reads.
#[derive(Debug)]
pub(crate) struct CudaEvent(*mut Opaque);

// SAFETY: a CUDA event belongs to a device, not to a thread.
unsafe impl Send for CudaEvent {}
// SAFETY: the `&self` methods call const methods of c10::Event, which read its fields and ask the driver, itself
// thread-safe; the one method that writes the fields, `record`, takes `&mut self`.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    pub(crate) fn new(timed: bool) -> Result<Self> {
        let mut event = std::ptr::null_mut();
        // SAFETY: the out-parameter is valid during the call.
        unsafe { check(rt_event_new(c_int::from(timed), &mut event)) }?;
        Ok(Self(event))
    }

    pub(crate) fn record(&mut self, stream: CudaStream) -> Result<()> {
        // SAFETY: the event is alive and borrowed alone; the id came from libtorch.
        unsafe { check(rt_event_record(self.0, stream.device, stream.id)) }
    }

    /// Makes later work of the stream wait for the event.
    pub(crate) fn block(&self, stream: CudaStream) -> Result<()> {
        // SAFETY: the event is alive; the id came from libtorch.
        unsafe { check(rt_event_block(self.0, stream.device, stream.id)) }
    }

    pub(crate) fn query(&self) -> Result<bool> {
        let mut done: c_int = 0;
        // SAFETY: the event is alive; the out-parameter is valid during the call.
        unsafe { check(rt_event_query(self.0, &mut done)) }?;
        Ok(done != 0)
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        // SAFETY: the event is alive.
        unsafe { check(rt_event_synchronize(self.0)) }
    }

    /// Seconds from this event to `end`.
    pub(crate) fn elapsed(&self, end: &CudaEvent) -> Result<f64> {
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive; the out-parameter is valid during the call.
        unsafe { check(rt_event_elapsed(self.0, end.0, &mut milliseconds)) }?;
        Ok(milliseconds / 1000.0)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: the event is ours and not used after this.
        unsafe { rt_event_free(self.0) };
    }
}

/// libtorch's thread-local state at one moment: grad mode, inference mode, autocast, profiler callbacks.
#[derive(Debug)]
pub(crate) struct ThreadState(*mut Opaque);

// SAFETY: at::ThreadLocalState is made to be moved to another thread, as the autograd engine does.
unsafe impl Send for ThreadState {}

impl ThreadState {
    pub(crate) fn capture() -> Result<Self> {
        let mut state = std::ptr::null_mut();
        // SAFETY: the out-parameter is valid during the call.
        unsafe { check(rt_thread_state_capture(&mut state)) }?;
        Ok(Self(state))
    }

    /// Applies the state to this thread.
    pub(crate) fn enter(&self) -> Result<ThreadStateGuard> {
        let mut guard = std::ptr::null_mut();
        // SAFETY: the state is alive during the call, and the guard keeps nothing of it.
        unsafe { check(rt_thread_state_enter(self.0, &mut guard)) }?;
        Ok(ThreadStateGuard { guard, _thread: PhantomData })
    }
}

impl Drop for ThreadState {
    fn drop(&mut self) {
        // SAFETY: the state is ours and not used after this.
        unsafe { rt_thread_state_free(self.0) };
    }
}

/// Restores the thread's former state when dropped.
#[derive(Debug)]
pub(crate) struct ThreadStateGuard {
    guard: *mut Opaque,
    /// Not `Send`: it restores the state of the thread that made it.
    _thread: PhantomData<*mut ()>,
}

impl Drop for ThreadStateGuard {
    fn drop(&mut self) {
        // SAFETY: the guard is ours, is left once, and on its own thread because this type is not `Send`.
        let restored = unsafe { check(rt_thread_state_leave(self.guard)) };
        // Setting the thread's own former state does not fail; an error could not be returned.
        drop(restored);
    }
}
