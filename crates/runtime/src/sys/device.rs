//! Discovery of CUDA, device-wide calls and host memory.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;

use tch::{Kind, Tensor};
use torch_sys::C_tensor;

use super::{Status, check, take};
use crate::error::{Error, Result};

unsafe extern "C" {
    fn rt_libtorch_folder(out: *mut *mut c_char) -> Status;
    fn rt_cuda_device_count(out: *mut c_int) -> Status;
    fn rt_cuda_initialise(out: *mut c_int) -> Status;
    fn rt_cuda_synchronize(device: c_int) -> Status;
    fn rt_cuda_synchronize_used() -> Status;
    fn rt_cuda_memory(device: c_int, free_bytes: *mut u64, total_bytes: *mut u64) -> Status;
    fn rt_host_empty(
        shape: *const i64,
        dims: usize,
        prototype: *const C_tensor,
        pinned: c_int,
        out: *mut *mut C_tensor,
    ) -> Status;
    fn rt_host_bytes(pinned: c_int, live: *mut u64, peak: *mut u64) -> Status;
    fn rt_storage_users(tensor: *const C_tensor, out: *mut u64) -> Status;
    fn rt_free_message(message: Status);
}

/// The folder of the libtorch that this process runs.
pub(crate) fn libtorch_folder() -> Result<PathBuf> {
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
    open_library(path).map(drop)
}

/// The handle of a library that is never closed.
fn open_library(path: &str) -> std::result::Result<*mut c_void, String> {
    let path = CString::new(path).map_err(|_| "the path holds a NUL byte".to_owned())?;
    // SAFETY: the path is NUL-terminated. The constructors that run are those of libtorch's CUDA half or of the
    // driver, made to be loaded into a running process; the library is never closed, so nothing of it can dangle.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: dlerror takes nothing, and gives null or a text that stays until this thread's next call of the loader.
    let message = unsafe {
        let text = libc::dlerror();
        if text.is_null() { None } else { Some(CStr::from_ptr(text).to_string_lossy().into_owned()) }
    };
    Err(message.unwrap_or_else(|| "the loader gave no reason".to_owned()))
}

/// Number of CUDA devices that libtorch sees; 0 while its CUDA half is not loaded.
pub(crate) fn cuda_device_count() -> Result<usize> {
    let mut count: c_int = 0;
    // SAFETY: the out-parameter is valid during the call.
    unsafe { check(rt_cuda_device_count(&mut count)) }?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Initialises CUDA; false when libtorch decided that there is none before its CUDA half was loaded.
pub(crate) fn cuda_initialise() -> Result<bool> {
    let mut hooked: c_int = 0;
    // SAFETY: the out-parameter is valid during the call.
    unsafe { check(rt_cuda_initialise(&mut hooked)) }?;
    Ok(hooked != 0)
}

/// Waits for all work on a CUDA device.
pub(crate) fn cuda_synchronize(device: c_int) -> Result<()> {
    // SAFETY: plain data in; the caller has checked that the device exists.
    unsafe { check(rt_cuda_synchronize(device)) }
}

/// Waits for all work on every CUDA device that this process uses; returns at once where it uses none.
fn cuda_synchronize_used() -> Result<()> {
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

/// The GPU's name as the driver gives it. The ordinal obeys `CUDA_VISIBLE_DEVICES`, as libtorch's does.
pub(crate) fn cuda_driver_name(device: c_int) -> Option<String> {
    let driver = open_library("libcuda.so.1").ok()?;
    let symbol = |name: &CStr| {
        // SAFETY: the handle is of a library that is never closed, the name is NUL-terminated.
        let address = unsafe { libc::dlsym(driver, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    };
    let (init, get, name) = (symbol(c"cuInit")?, symbol(c"cuDeviceGet")?, symbol(c"cuDeviceGetName")?);
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

/// An uninitialised CPU tensor, in page-locked memory or on ordinary pages of its own.
pub(crate) fn host_empty(shape: &[i64], kind: Kind, pinned: bool) -> Result<Tensor> {
    let prototype = Tensor::f_empty([0], (kind, tch::Device::Cpu))?;
    let mut out: *mut C_tensor = std::ptr::null_mut();
    // SAFETY: shape and prototype are borrowed during the call; on success the tensor that comes out is ours.
    let tensor = unsafe {
        check(rt_host_empty(shape.as_ptr(), shape.len(), prototype.as_ptr(), c_int::from(pinned), &mut out))?;
        take(out)
    };
    tensor.ok_or_else(|| Error::Torch("no tensor came back".into()))
}

/// Live and peak bytes of page-locked memory, or of what [`host_empty`] handed out without pinning.
pub(crate) fn host_bytes(pinned: bool) -> Result<(u64, u64)> {
    let (mut live, mut peak) = (0, 0);
    // SAFETY: the out-parameters are valid during the call.
    unsafe { check(rt_host_bytes(c_int::from(pinned), &mut live, &mut peak)) }?;
    Ok((live, peak))
}

/// How many tensors share the storage of `tensor`, itself included.
fn storage_users(tensor: &Tensor) -> Result<u64> {
    let mut users = 0;
    // SAFETY: the tensor is borrowed and the out-parameter is valid during the call.
    unsafe { check(rt_storage_users(tensor.as_ptr(), &mut users)) }?;
    Ok(users)
}

/// A type of which every bit pattern is a value.
///
/// # Safety
/// It has no padding and no invalid bit pattern, and [`Plain::KIND`] is the kind of the same size.
pub(crate) unsafe trait Plain: Copy {
    /// libtorch's name of the type.
    const KIND: Kind;
}

macro_rules! plain {
    ($($element:ty => $kind:ident),* $(,)?) => { $(
        // SAFETY: a plain number: no padding, every bit pattern is a value, same size as the kind.
        unsafe impl Plain for $element {
            const KIND: Kind = Kind::$kind;
        }
    )* };
}
plain! {
    u8 => Uint8, i8 => Int8, i16 => Int16, i32 => Int, i64 => Int64,
    half::f16 => Half, half::bf16 => BFloat16, f32 => Float, f64 => Double,
}

/// A block of initialised host memory that tensors may view.
#[derive(Debug)]
pub(crate) struct HostBlock {
    /// Contiguous `Uint8` on the CPU, every byte initialised; never handed out, so nobody can resize it.
    bytes: Tensor,
    /// Its length.
    len: usize,
    /// Whether tensors viewed it since the devices were last waited for: a device may still copy for a view that is gone.
    viewed: Cell<bool>,
}

impl HostBlock {
    pub(crate) fn zeroed(len: usize, pinned: bool) -> Result<Self> {
        let size = i64::try_from(len).map_err(|_| {
            Error::invalid("pinned buffer", format!("{len} bytes is more than a tensor can hold"))
        })?;
        let mut bytes = host_empty(&[size], Kind::Uint8, pinned)?;
        let _ = bytes.f_zero_()?;
        Ok(Self { bytes, len, viewed: Cell::new(false) })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// A tensor over `[offset, offset + size)`; `&mut`, so that no slice of the block is alive.
    pub(crate) fn view(&mut self, offset: usize, size: usize) -> Result<Tensor> {
        self.viewed.set(true);
        // Both were checked against `len`, which fits an i64.
        Ok(self.bytes.f_narrow(0, offset as i64, size as i64)?)
    }

    /// How many tensors view the block.
    pub(crate) fn views(&self) -> Result<u64> {
        Ok(storage_users(&self.bytes)?.saturating_sub(1))
    }

    /// Whether the block may be lent as numbers. When it is, nobody uses it: no tensor views it, and no device is still
    /// copying for one that did. A copy is submitted while its tensor lives, so that a wait after the last one is gone
    /// is a wait for all of them.
    fn lendable<T: Plain>(&self) -> Result<bool> {
        if self.views()? != 0 || !self.len.is_multiple_of(size_of::<T>()) {
            return Ok(false);
        }
        // Whatever device the block was made for: a view can be copied to any.
        if self.viewed.get() {
            cuda_synchronize_used()?;
            self.viewed.set(false);
        }
        Ok(true)
    }

    /// The block as numbers; `None` when tensors view it, or when it is not a whole number of them. Waits for the CUDA
    /// devices in use when tensors viewed it before.
    pub(crate) fn numbers<T: Plain>(&self) -> Result<Option<&[T]>> {
        if !self.lendable::<T>()? {
            return Ok(None);
        }
        // SAFETY: the block is initialised, its address is that of a page or of page-locked memory and so aligned for
        // any number, and lives as long as `self`. Nobody writes to it while the slice is alive: no tensor views it and
        // no device copies to it, and `view`, the only way to get a tensor, takes `&mut self`.
        Ok(Some(unsafe { self.slice() }))
    }

    /// As [`HostBlock::numbers`], to write.
    pub(crate) fn numbers_mut<T: Plain>(&mut self) -> Result<Option<&mut [T]>> {
        if !self.lendable::<T>()? {
            return Ok(None);
        }
        // SAFETY: as in `numbers`, and no device reads it either; `&mut self` makes the slice the only one.
        Ok(Some(unsafe {
            let pointer = self.address().cast::<T>();
            std::slice::from_raw_parts_mut(pointer, self.len / size_of::<T>())
        }))
    }

    fn address(&self) -> *mut u8 {
        match self.len {
            // libtorch gives a null address to an empty pinned tensor; this one is aligned for any number.
            0 => std::ptr::without_provenance_mut(64),
            _ => self.bytes.data_ptr().cast(),
        }
    }

    /// # Safety
    /// The block is a whole number of `T`, and nobody writes to it while the slice is alive.
    unsafe fn slice<T: Plain>(&self) -> &[T] {
        // SAFETY: by this function's contract, and the block's own: initialised, aligned, alive as long as `self`.
        unsafe { std::slice::from_raw_parts(self.address().cast::<T>(), self.len / size_of::<T>()) }
    }
}
