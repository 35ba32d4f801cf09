//! A file as memory.

use std::fs::File;
use std::ops::Range;

use memmap2::{Mmap, UncheckedAdvice};
use tch::{Device, Kind, Tensor};

use crate::error::Result;

/// Maps the whole file for reading.
pub(crate) fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the mapping is private to this process and read only. That nobody shortens or rewrites the file meanwhile is
    // what every reader of mapped files has to trust; `MappedFile` says so to its callers, and the writers of this project
    // make a new file and rename it, which leaves an open mapping as it was.
    unsafe { Mmap::map(file) }
}

/// Gives the pages of a range back to the system; they are read from the file again when they are touched.
pub(crate) fn forget(map: &Mmap, range: Range<usize>) -> std::io::Result<()> {
    // SAFETY: the mapping is of a file and read only, so a page that is dropped comes back as the file has it: no reader can
    // see a difference.
    unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) }
}

/// Copies contiguous values of `kind` from `bytes` into `destination`, which has as many. The caller has compared the sizes and
/// seen that the bytes are aligned.
pub(crate) fn copy_values(bytes: &[u8], kind: Kind, destination: &Tensor) -> Result<()> {
    let size = destination.size();
    let mut strides = vec![1; size.len()];
    for axis in (1..size.len()).rev() {
        strides[axis - 1] = strides[axis] * size[axis];
    }
    // SAFETY: the tensor covers `bytes` and no more; it is only read, and is gone before this function, and with it the borrow,
    // ends: a copy from pageable memory has happened when it returns, on whatever device it goes to.
    let values = unsafe { Tensor::f_from_blob(bytes.as_ptr(), &size, &strides, kind, Device::Cpu) }?;
    let _no_grad = tch::no_grad_guard();
    destination.shallow_clone().f_copy_(&values)?;
    Ok(())
}
