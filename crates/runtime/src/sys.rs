//! The bindings of the C++ shim, and the only `unsafe` code of the crate.
//!
//! Three layers: `extern "C"` declarations, their statuses as [`Result`], and safe functions over both. A module of
//! this folder has all three for one subject; the public modules of the crate have none.
//!
//! # Sanitizers
//!
//! They run by hand. The tests, with the C++ of this crate, under AddressSanitizer (libtorch's own code is not instrumented):
//!
//! ```sh
//! CXXFLAGS="-fsanitize=address -fno-omit-frame-pointer" RUSTC_BOOTSTRAP=1 ASAN_OPTIONS=detect_leaks=0 \
//!   RUSTFLAGS="-Zsanitizer=address -Cunsafe-allow-abi-mismatch=sanitizer" LD_LIBRARY_PATH=$PWD/.libtorch/lib \
//!   cargo test -p runtime --test it --target x86_64-unknown-linux-gnu --target-dir target/asan
//! ```
//!
//! It finds nothing. The test `memory_region`, which reads the process's resident memory, fails under it, because freed memory is kept.
//! ThreadSanitizer needs an instrumented standard library (`-Zbuild-std` and its sources); with the toolchain's own it reports every message
//! and lock of the standard library, those of the test harness first. Valgrind's processor has AVX2 and no AVX-512; in `memory_limit` and
//! `counter` it reports only values that libtorch's `dense_to_sparse` uses uninitialised.

use std::any::Any;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use smallvec::SmallVec;
use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::{Error, Result, strip_frames};

/// The result of a function of the shim: null, or a message that the caller owns.
pub(crate) type Status = *mut c_char;

pub(crate) mod autocast;
pub(crate) mod autograd;
pub(crate) mod collectives;
pub(crate) mod device;
pub(crate) mod file;
pub(crate) mod graph;
pub(crate) mod heap;
pub(crate) mod host_memory;
pub(crate) mod kernel_caches;
pub mod layout;
pub(crate) mod memory;
pub(crate) mod ops;
pub(crate) mod optimizer;
pub mod parallel;
pub(crate) mod profile;
pub(crate) mod random;
pub(crate) mod recorder;
pub(crate) mod signals;
#[cfg(any(target_os = "linux", target_os = "macos"))]
pub(crate) mod sockets;
pub(crate) mod stream;
pub mod tensor;
pub(crate) mod wait_policy;

unsafe extern "C" {
    fn rt_free_message(message: Status);
    fn rt_copy_message(text: *const c_char, size: usize) -> Status;
    safe fn rt_torch_version() -> *const c_char;
}

/// Converts a status of the shim to a result, and frees its message.
///
/// # Safety
/// `status` was returned by a function of the shim and has not been checked before.
pub(crate) unsafe fn check(status: Status) -> Result<()> {
    if status.is_null() {
        return Ok(());
    }
    // SAFETY: a non-null status is a NUL-terminated message (guard.h).
    let message = strip_frames(&unsafe { CStr::from_ptr(status) }.to_string_lossy()).to_owned();
    // SAFETY: the message is ours and not used after this.
    unsafe { rt_free_message(status) };
    Err(Error::Torch(message))
}

/// Runs Rust code that C++ called. An `Err` and a panic both become a status.
pub(crate) fn callback(body: impl FnOnce() -> Result<()>) -> Status {
    // Formatting an error runs a user's code, which may panic too; so may the drop of a panic's payload.
    let told = catch_unwind(AssertUnwindSafe(|| body().map_err(|error| error_chain(&error))));
    let message = match told {
        Ok(Ok(())) => return std::ptr::null_mut(),
        Ok(Err(message)) => message,
        Err(panic) => {
            let message = format!("panicked: {}", panic_message(&*panic));
            if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
                std::mem::forget(second);
            }
            message
        }
    };
    // SAFETY: the bytes are valid for the given size during the call.
    unsafe { rt_copy_message(message.as_ptr().cast(), message.len()) }
}

/// Returns the message of a panic's payload.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

/// Returns the messages of an error and of its causes.
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Returns the version of the libtorch that the shim was compiled against.
pub(crate) fn torch_version() -> &'static str {
    // SAFETY: the shim returns a static NUL-terminated text.
    unsafe { CStr::from_ptr(rt_torch_version()) }.to_str().unwrap_or("unknown")
}

/// Returns borrowed pointers to tensors, for a call that only reads the tensor objects.
pub(crate) fn pointers(tensors: &[impl std::borrow::Borrow<Tensor>]) -> SmallVec<[*const C_tensor; 8]> {
    tensors.iter().map(|tensor| tensor.borrow().as_ptr()).collect()
}

/// Takes ownership of a tensor from the shim; null is "no tensor".
///
/// # Safety
/// `pointer` is null or a tensor that the shim returned to the caller, not taken before.
pub(crate) unsafe fn take(pointer: *mut C_tensor) -> Option<Tensor> {
    // SAFETY: by this function's contract the tensor is ours.
    (!pointer.is_null()).then(|| unsafe { Tensor::from_ptr(pointer) })
}
