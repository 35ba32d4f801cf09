//! Tensors over a file's pages, and bytes copied between tensors and files.

use std::ffi::c_void;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;

use files::pages::Pages;
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::tensor::bump_version;
use super::{Status, check, take};
use crate::error::{Error, Result};

unsafe extern "C" {
    fn rt_tensor_over(
        memory: *mut c_void,
        shape: *const i64,
        dims: usize,
        prototype: *const C_tensor,
        owner: *mut c_void,
        release: extern "C" fn(*mut c_void),
        out: *mut *mut C_tensor,
    ) -> Status;
}

extern "C" fn release(owner: *mut c_void) {
    // SAFETY: the pointer is the box that `tensor_over` gave away, and libtorch gives it back once.
    drop(unsafe { Box::from_raw(owner.cast::<Pages>()) });
}

/// Returns a contiguous tensor over the pages, which it owns. The caller has checked sizes and alignment.
pub(crate) fn tensor_over(pages: Pages, shape: &[i64], kind: Kind) -> Result<Tensor> {
    let prototype = Tensor::f_empty([0], (kind, Device::Cpu))?;
    let memory = pages.as_mut_ptr().cast::<c_void>();
    let owner = Box::into_raw(Box::new(pages)).cast::<c_void>();
    let mut out: *mut C_tensor = std::ptr::null_mut();
    // SAFETY: the memory is that of the pages, at least as large as the tensor (checked by the caller), and lives until `release` is called,
    // when no tensor views it any more; shape and prototype are borrowed during the call; the new tensor is ours.
    let tensor = unsafe {
        let shape = (shape.as_ptr(), shape.len());
        check(rt_tensor_over(memory, shape.0, shape.1, prototype.as_ptr(), owner, release, &mut out))?;
        take(out)
    };
    tensor.ok_or_else(|| Error::Torch("no tensor came back".into()))
}

/// Fills a contiguous CPU tensor with the file's bytes from `offset` on.
pub(crate) fn read_into(file: &File, offset: u64, target: &Tensor) -> Result<std::io::Result<()>> {
    let len = target.numel() * target.kind().elt_size_in_bytes();
    if len == 0 {
        return Ok(Ok(()));
    }
    // Before the first byte changes, so that a graph that saved the tensor never uses a partly written one.
    bump_version(target)?;
    // SAFETY: the tensor is contiguous and on the CPU (checked by the caller), so these are exactly its bytes; bytes have no
    // invalid value. As with every in-place operation of libtorch, the caller ensures that no thread uses them meanwhile.
    let bytes = unsafe { std::slice::from_raw_parts_mut(target.data_ptr().cast::<u8>(), len) };
    Ok(file.read_exact_at(bytes, offset))
}

/// Writes the bytes of a contiguous CPU tensor.
pub(crate) fn write_values(out: &mut dyn Write, tensor: &Tensor) -> std::io::Result<()> {
    let len = tensor.numel() * tensor.kind().elt_size_in_bytes();
    if len == 0 {
        return Ok(());
    }
    // SAFETY: the tensor is contiguous and on the CPU (checked by the caller), so these are exactly its bytes, which live as long as it
    // does. As with every operation of libtorch that reads it, the caller ensures that no thread writes them meanwhile.
    let bytes = unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), len) };
    out.write_all(bytes)
}

/// Copies contiguous values of `kind` from `bytes` into `destination`, which has as many. The caller has checked sizes and
/// alignment.
pub(crate) fn copy_values(bytes: &[u8], kind: Kind, destination: &Tensor) -> Result<()> {
    let size = destination.size();
    let mut strides = vec![1; size.len()];
    for axis in (1..size.len()).rev() {
        strides[axis - 1] = strides[axis] * size[axis];
    }
    // SAFETY: the tensor covers exactly `bytes`, is only read, and is dropped before this function, and with it the borrow, ends:
    // a copy from pageable memory is complete when it returns, to any device.
    let values = unsafe { Tensor::f_from_blob(bytes.as_ptr(), &size, &strides, kind, Device::Cpu) }?;
    let _no_grad = tch::no_grad_guard();
    destination.shallow_clone().f_copy_(&values)?;
    Ok(())
}
