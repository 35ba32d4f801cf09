//! Tensors from files: memory-mapped, or read into existing memory. And tensors' bytes to files.
//!
//! [`tensor_over`] uses no memory until the values are touched, and then pages that the system can reclaim. [`read_into`] is the
//! fast way to load: one copy from the page cache, no page faults, and an error if the file ends too early, where a mapping would
//! end the process.
//!
//! ```
//! use std::fs::File;
//!
//! use runtime::file;
//! use tch::{Kind, Tensor};
//!
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("values");
//! std::fs::write(&path, [0u8, 0, 0, 0, 0, 0, 128, 63])?;
//! let over = file::tensor_over(&path, 0, &[2], Kind::Float)?;
//! assert_eq!(Vec::<f32>::try_from(&over)?, [0.0, 1.0]);
//!
//! let read = Tensor::zeros([1], (Kind::Float, tch::Device::Cpu));
//! file::read_into(&File::open(&path)?, &path, 4, &read)?;
//! assert_eq!(read, over.narrow(0, 1, 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::Path;

use files::pages::{self, Pages};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::sys::file as sys;

/// Maps the file's bytes from `offset` as a contiguous CPU tensor, in this machine's byte order. Writes stay in this process, and
/// use memory. The file must not be shortened while the tensor lives: see [`files::mapped`].
///
/// # Errors
/// [`Error::Io`] with the path: no such file, no permission, a file that is too short. [`Error::Invalid`] for an invalid shape, or
/// an offset that is not a multiple of the element size.
pub fn tensor_over(path: &Path, offset: u64, shape: &[i64], kind: Kind) -> Result<Tensor> {
    const OPERATION: &str = "tensor over a file";
    let io = |cause| Error::Io { path: path.to_owned(), cause };
    let width = kind.elt_size_in_bytes();
    let bytes = shape.iter().try_fold(width, |bytes, &size| bytes.checked_mul(usize::try_from(size).ok()?));
    let Some(bytes) = bytes else {
        return Err(Error::invalid(
            OPERATION,
            format!("the shape {shape:?} of {kind:?} is not one of a tensor"),
        ));
    };
    if !offset.is_multiple_of(width as u64) {
        let reason = format!("the offset {offset} is not a multiple of {kind:?}'s {width} bytes");
        return Err(Error::invalid(OPERATION, reason));
    }
    let file = File::open(path).map_err(io)?;
    let length = file.metadata().map_err(io)?.len();
    if offset.checked_add(bytes as u64).is_none_or(|end| end > length) {
        let reason = format!(
            "{bytes} bytes from {offset} on reach beyond the file's {length}; copy or download it again"
        );
        return Err(io(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, reason)));
    }
    if bytes == 0 {
        return Ok(Tensor::f_empty(shape, (kind, Device::Cpu))?);
    }
    sys::tensor_over(Pages::private(&file, offset, bytes).map_err(io)?, shape, kind)
}

/// Lets the system reclaim the memory of a [`tensor_over`] a file, or of a part of it: pages that were read and not written are read from
/// the file again at the next access. For who reads all of a large file once. No thread may write to the tensor meanwhile. Other tensors
/// stay as they are.
///
/// # Errors
/// [`Error::Io`] if the system refuses.
pub fn forget(tensor: &Tensor) -> Result<()> {
    let Some(bytes) = addresses(tensor) else { return Ok(()) };
    pages::forget(&bytes).map_err(|cause| Error::Io { path: "the pages of a mapped file".into(), cause })
}

/// Returns the addresses of a tensor's bytes, if it has contiguous memory on the CPU.
pub(crate) fn addresses(tensor: &Tensor) -> Option<Range<usize>> {
    if tensor.device() != Device::Cpu || !tensor.is_contiguous() || tensor.numel() == 0 {
        return None;
    }
    let start = tensor.data_ptr() as usize;
    Some(start..start + tensor.numel() * tensor.kind().elt_size_in_bytes())
}

/// Fills `target`, a contiguous CPU tensor, with the bytes of `file` from `offset`, in this machine's byte order; errors name the
/// file `path`. To autograd it is an in-place change.
///
/// # Errors
/// [`Error::Io`] if the file ends too early or cannot be read: the target's values are undefined then. [`Error::Invalid`] for a
/// target that is not contiguous, or on another device.
pub fn read_into(file: &File, path: &Path, offset: u64, target: &Tensor) -> Result<()> {
    if target.device() != Device::Cpu || !target.is_contiguous() || target.is_neg() {
        let (device, size) = (crate::device::flag(target.device()), target.size());
        let reason = format!(
            "the target {size:?} is on {device} or not contiguous; expected contiguous memory on the CPU"
        );
        return Err(Error::invalid("read_into", reason));
    }
    sys::read_into(file, offset, target)?.map_err(|cause| {
        let bytes = target.numel() * target.kind().elt_size_in_bytes();
        let reason = format!("{bytes} bytes from {offset} on: {cause}; is the file whole?");
        Error::Io { path: path.to_owned(), cause: std::io::Error::new(cause.kind(), reason) }
    })
}

/// Writes the bytes of `tensor`, which is contiguous and on the CPU, in this machine's byte order, without a copy.
///
/// # Errors
/// Errors of `out`; [`std::io::ErrorKind::InvalidInput`] for a tensor that is not contiguous, or on another device.
pub fn write_values(out: &mut dyn Write, tensor: &Tensor) -> std::io::Result<()> {
    if tensor.device() != Device::Cpu || !tensor.is_contiguous() {
        let (device, size) = (crate::device::flag(tensor.device()), tensor.size());
        let reason = format!(
            "the tensor {size:?} is on {device} or not contiguous; expected contiguous memory on the CPU"
        );
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, reason));
    }
    // Its memory has the other sign.
    let tensor = tensor.f_resolve_neg().map_err(std::io::Error::other)?;
    sys::write_values(out, &tensor)?;
    addresses(&tensor).map_or(Ok(()), |bytes| pages::release(&bytes))
}

/// Copies the values in `bytes`, contiguous and in this machine's byte order, into `destination`, with conversion of dtype and
/// device. This is the only copy from the pages of a mapped file, except for bytes that are not aligned to their elements.
///
/// ```
/// use tch::{Device, Kind, Tensor};
///
/// let halves = Tensor::zeros([2], (Kind::BFloat16, Device::Cpu));
/// let bytes: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
/// runtime::file::copy_values(&bytes, Kind::Float, &halves)?;
/// assert_eq!(Vec::<f32>::try_from(halves.to_kind(Kind::Float))?, [1.5, -2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] if the number of bytes does not match the destination's elements; those of libtorch.
pub fn copy_values(bytes: &[u8], kind: Kind, destination: &Tensor) -> Result<()> {
    let width = kind.elt_size_in_bytes();
    if destination.numel().checked_mul(width) != Some(bytes.len()) {
        let (found, size) = (bytes.len(), destination.size());
        return Err(Error::invalid(
            "copy_values",
            format!("{found} bytes of {kind:?} for a tensor of {size:?}; expected {width} for each element"),
        ));
    }
    if bytes.is_empty() {
        return Ok(());
    }
    if (bytes.as_ptr() as usize).is_multiple_of(width) {
        return sys::copy_values(bytes, kind, destination);
    }
    let values = Tensor::f_from_data_size(bytes, &destination.size(), kind)?;
    let _no_grad = tch::no_grad_guard();
    destination.shallow_clone().f_copy_(&values)?;
    Ok(())
}
