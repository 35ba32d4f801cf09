//! CPU tensors whose memory is a file: written as any other, and larger than the machine's memory if need be.
//!
//! Their pages are in memory only while they are used: [`release`] ends their use, and the system writes them to the disk when it needs
//! their memory. The file has no name, and is freed with the tensor, however the process ends.
//!
//! ```
//! use runtime::file_memory;
//! use tch::Kind;
//!
//! let folder = tempfile::tempdir()?;
//! let mut moments = file_memory::zeros(folder.path(), &[2, 3], Kind::Float)?;
//! file_memory::fetch(&moments)?;
//! let _ = moments.f_add_scalar_(1.0)?;
//! file_memory::release(&moments)?;
//! assert_eq!(moments.f_double_value(&[1, 2])?, 1.0);
//! assert!(file_memory::is_in_file(&moments));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::ops::Range;
use std::path::Path;

use files::pages::{self, Pages};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::file::addresses;

/// Creates a tensor of zeros in an unnamed file in `folder`, whose space on the disk is reserved. An empty tensor needs none.
///
/// # Errors
/// [`Error::Io`] with the folder: it cannot be written, or its disk is full. [`Error::Invalid`] for an invalid shape.
pub fn zeros(folder: &Path, shape: &[i64], kind: Kind) -> Result<Tensor> {
    let width = kind.elt_size_in_bytes();
    let bytes = shape.iter().try_fold(width, |bytes, &size| bytes.checked_mul(usize::try_from(size).ok()?));
    let Some(bytes) = bytes else {
        return Err(Error::invalid(
            "zeros",
            format!("the shape {shape:?} of {kind:?} is not one of a tensor"),
        ));
    };
    if bytes == 0 {
        return Ok(Tensor::f_zeros(shape, (kind, Device::Cpu))?);
    }
    let memory = Pages::unnamed(folder, bytes).map_err(|cause| {
        let reason = format!("{bytes} bytes in a file in it: {cause}");
        Error::Io { path: folder.to_owned(), cause: std::io::Error::new(cause.kind(), reason) }
    })?;
    crate::sys::file::tensor_over(memory, shape, kind)
}

/// Creates a tensor of zeros where `other` is: in an unnamed file in the same folder, or on its device.
///
/// # Errors
/// As [`zeros`].
pub fn zeros_beside(other: &Tensor, shape: &[i64], kind: Kind) -> Result<Tensor> {
    match addresses_in_files(other).and_then(|bytes| pages::folder_of(&bytes)) {
        Some(folder) => zeros(&folder, shape, kind),
        None => Ok(Tensor::f_zeros(shape, (kind, other.device()))?),
    }
}

/// Returns whether the tensor's values are in a file of [`zeros`].
pub fn is_in_file(tensor: &Tensor) -> bool {
    addresses_in_files(tensor).is_some_and(|bytes| pages::is_unnamed_file(&bytes))
}

/// Brings the pages of a tensor into memory at once, faster than one by one at their first use. A page that the disk does not give back is
/// an error here, and would end the process later. Without effect for other tensors.
///
/// # Errors
/// Pages that cannot be read.
pub fn fetch(tensor: &Tensor) -> Result<()> {
    let failed = |cause: std::io::Error| {
        format!("pages of a tensor in a file do not come back from its disk: {cause}")
    };
    let Some(bytes) = addresses_in_files(tensor) else { return Ok(()) };
    pages::fetch(&bytes).map_err(|cause| Error::Other(failed(cause).into()))
}

/// Ends the use of the pages of a tensor's file by this process: they count to its memory no more, and the system may write them to the disk.
/// Values stay; views of the same file read their pages again. Without effect for other tensors.
///
/// # Errors
/// A system that refuses.
pub fn release(tensor: &Tensor) -> Result<()> {
    let failed = |cause: std::io::Error| format!("the pages of a tensor in a file are not released: {cause}");
    let Some(bytes) = addresses_in_files(tensor) else { return Ok(()) };
    pages::release(&bytes).map_err(|cause| Error::Other(failed(cause).into()))
}

/// Returns the addresses of a CPU tensor's values, without asking for them where no file is used: a training step asks for each weight.
fn addresses_in_files(tensor: &Tensor) -> Option<Range<usize>> {
    pages::has_unnamed_files().then(|| addresses(tensor)).flatten()
}
