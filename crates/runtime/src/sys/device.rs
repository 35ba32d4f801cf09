//! Discovery of CUDA and device-wide calls.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;

use super::{Status, check};
use crate::error::Result;

unsafe extern "C" {
    fn rt_libtorch_folder(out: *mut *mut c_char) -> Status;
    fn rt_driver_visible() -> c_int;
    fn rt_cuda_device_count(out: *mut c_int) -> Status;
    fn rt_cuda_initialise(out: *mut c_int) -> Status;
    fn rt_cuda_synchronize(device: c_int) -> Status;
    fn rt_cuda_make_current(device: c_int) -> Status;
    fn rt_cuda_synchronize_used() -> Status;
    fn rt_cuda_memory(device: c_int, free_bytes: *mut u64, total_bytes: *mut u64) -> Status;
    fn rt_free_message(message: Status);
}

/// Returns the folder of the libtorch that this process has loaded.
///
/// # Errors
/// A loader that does not know it.
pub fn libtorch_folder() -> Result<PathBuf> {
    let mut text: *mut c_char = std::ptr::null_mut();
    // SAFETY: the out-parameter is valid during the call.
    unsafe { check(rt_libtorch_folder(&mut text)) }?;
    // SAFETY: on success the shim wrote a NUL-terminated message.
    let folder = PathBuf::from(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
    // SAFETY: the message is ours and not used after this.
    unsafe { rt_free_message(text) };
    Ok(folder)
}

/// Loads a shared library for the rest of the process, its symbols visible to all. The error is the loader's own.
pub(crate) fn load_library(path: &str) -> std::result::Result<(), String> {
    // SAFETY: libtorch_cuda may be loaded into a running process.
    unsafe { open_library(path) }.map(drop)
}

/// Returns the handle of a library, which is never closed, so that no pointer into it dangles.
///
/// # Errors
/// The loader's reason.
///
/// # Safety
/// The library's constructors may run in a living process.
pub unsafe fn open_library(path: &str) -> std::result::Result<*mut c_void, String> {
    let path = CString::new(path).map_err(|_| "the path holds a NUL byte".to_owned())?;
    // SAFETY: the path is NUL-terminated; the caller vouches for the constructors.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: dlerror has no arguments, and returns null or a text that is valid until this thread's next call of the loader.
    let message = unsafe {
        let text = libc::dlerror();
        if text.is_null() { None } else { Some(CStr::from_ptr(text).to_string_lossy().into_owned()) }
    };
    Err(message.unwrap_or_else(|| "the loader gave no reason".to_owned()))
}

/// Whether an NVIDIA driver seems to be installed: on Linux, in a container, under WSL.
pub(crate) fn driver_visible() -> bool {
    // SAFETY: a plain call that looks for files.
    unsafe { rt_driver_visible() != 0 }
}

/// Number of CUDA devices that libtorch sees; 0 while libtorch_cuda is not loaded.
pub(crate) fn cuda_device_count() -> Result<usize> {
    let mut count: c_int = 0;
    // SAFETY: the out-parameter is valid during the call.
    unsafe { check(rt_cuda_device_count(&mut count)) }?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Initialises CUDA; false if libtorch had checked for CUDA before libtorch_cuda was loaded.
pub(crate) fn cuda_initialise() -> Result<bool> {
    let mut hooked: c_int = 0;
    // SAFETY: the out-parameter is valid during the call.
    unsafe { check(rt_cuda_initialise(&mut hooked)) }?;
    Ok(hooked != 0)
}

/// Makes a device that exists this thread's current one.
pub(crate) fn cuda_make_current(device: c_int) -> Result<()> {
    // SAFETY: a call without memory of this side.
    unsafe { check(rt_cuda_make_current(device)) }
}

/// Waits for all work on a CUDA device.
pub(crate) fn cuda_synchronize(device: c_int) -> Result<()> {
    // SAFETY: plain data in; the caller has checked that the device exists.
    unsafe { check(rt_cuda_synchronize(device)) }
}

/// Waits for all work on every CUDA device that this process uses; returns at once if it uses none.
pub(crate) fn cuda_synchronize_used() -> Result<()> {
    // SAFETY: a plain call; the status is fresh.
    unsafe { check(rt_cuda_synchronize_used()) }
}

/// Free and total bytes of a CUDA device.
pub(crate) fn cuda_memory(device: c_int) -> Result<(u64, u64)> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the out-parameters are valid during the call.
    unsafe { check(rt_cuda_memory(device, &mut free, &mut total)) }?;
    Ok((free, total))
}

/// The address of a function of the driver.
fn driver_symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the driver may be loaded into a running process.
    let driver = unsafe { open_library("libcuda.so.1") }.ok()?;
    // SAFETY: the handle is of a library that is never closed, the name is NUL-terminated.
    let address = unsafe { libc::dlsym(driver, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

/// The newest CUDA that the driver supports, as cuda.h writes it: 13000 for 13.0.
pub(crate) fn cuda_driver_version() -> Option<c_int> {
    let get = driver_symbol(c"cuDriverGetVersion")?;
    // SAFETY: this is the driver's function with the signature of cuda.h, unchanged since its first version.
    let get = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(*mut c_int) -> c_int>(get) };
    let mut version = 0;
    (get(&mut version) == 0).then_some(version)
}

/// The GPU's name as the driver gives it. The ordinal obeys `CUDA_VISIBLE_DEVICES`, as libtorch's does.
pub(crate) fn cuda_driver_name(device: c_int) -> Option<String> {
    let (init, get, name) =
        (driver_symbol(c"cuInit")?, driver_symbol(c"cuDeviceGet")?, driver_symbol(c"cuDeviceGetName")?);
    // SAFETY: these are the driver's functions with the signatures of cuda.h, unchanged since its first version.
    let (init, get, name) = unsafe {
        (
            std::mem::transmute::<*mut c_void, extern "C" fn(u32) -> c_int>(init),
            std::mem::transmute::<*mut c_void, extern "C" fn(*mut c_int, c_int) -> c_int>(get),
            std::mem::transmute::<*mut c_void, extern "C" fn(*mut c_char, c_int, c_int) -> c_int>(name),
        )
    };
    let mut handle: c_int = 0;
    let mut text = [0 as c_char; 256];
    if init(0) != 0 || get(&mut handle, device) != 0 || name(text.as_mut_ptr(), 255, handle) != 0 {
        return None;
    }
    // SAFETY: the driver wrote at most 255 bytes with their NUL, and the last byte of the array is still 0.
    Some(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}
