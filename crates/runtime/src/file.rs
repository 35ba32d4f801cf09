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
use std::path::Path;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::sys::file as sys;

/// Maps the file's bytes from `offset` as a contiguous CPU tensor, in this machine's byte order. Writes stay in this process, and
/// use memory. The file must not be shortened while the tensor lives: see [`crate::mapped`].
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
    sys::tensor_over(sys::map_private(&file, offset, bytes).map_err(io)?, shape, kind)
}

/// Lets the system reclaim the memory of a [`tensor_over`] a file, or of a part of it: pages that were read and not written are read from
/// the file again at the next access. For who reads all of a large file once. No thread may write to the tensor meanwhile. Other tensors
/// stay as they are.
///
/// # Errors
/// [`Error::Io`] if the system refuses.
pub fn forget(tensor: &Tensor) -> Result<()> {
    if tensor.device() != Device::Cpu || !tensor.is_contiguous() || tensor.numel() == 0 {
        return Ok(());
    }
    sys::forget(tensor).map_err(|cause| Error::Io { path: "the pages of a mapped file".into(), cause })
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
/// Those of `out`; [`std::io::ErrorKind::InvalidInput`] for a tensor that is not contiguous, or on another device.
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
    sys::write_values(out, &tensor)
}
