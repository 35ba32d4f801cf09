//! Memory-mapped files.

use std::fs::File;
use std::ops::Range;

use memmap2::{Mmap, UncheckedAdvice};
use tch::{Device, Kind, Tensor};

use crate::error::Result;

/// Maps the whole file for reading.
pub(crate) fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the mapping is private to this process and read only. Nobody shortens or rewrites the file
    // meanwhile: a requirement of all mapped files, which `MappedFile` documents. The writers of this project make a new file and
    // rename it, which does not change an open mapping.
    unsafe { Mmap::map(file) }
}

/// Frees the memory of a range's pages; they are read from the file again at the next access.
pub(crate) fn forget(map: &Mmap, range: Range<usize>) -> std::io::Result<()> {
    // SAFETY: the mapping is of a file and read only, so a freed page is read again with the same
    // content.
    unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) }
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
