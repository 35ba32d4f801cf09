//! Memory-mapped files: opened instantly whatever their size, read page by page when touched.
//!
//! For weights and token stores, which are written once and then only read. A file must not be shortened or rewritten in place
//! while it is mapped (write a new one and rename it, as all of this project does): the operating system would end the process at
//! the first access to a removed page. A program can have the file named then ([`report_shortened_files`]).
//!
//! ```
//! use runtime::mapped::MappedFile;
//!
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("tokens.bin");
//! std::fs::write(&path, [1, 2, 3])?;
//! assert_eq!(MappedFile::open(&path)?[1..], [2, 3]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};

/// Copies the values in `bytes`, contiguous and in this machine's byte order, into `destination`, with conversion of dtype and
/// device. This is the only copy from the pages of a mapped file, except for bytes that are not aligned to their elements.
///
/// ```
/// use tch::{Device, Kind, Tensor};
///
/// let halves = Tensor::zeros([2], (Kind::BFloat16, Device::Cpu));
/// let bytes: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
/// runtime::mapped::copy_values(&bytes, Kind::Float, &halves)?;
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
        return crate::sys::mapped::copy_values(bytes, kind, destination);
    }
    let values = Tensor::f_from_data_size(bytes, &destination.size(), kind)?;
    let _no_grad = tch::no_grad_guard();
    destination.shallow_clone().f_copy_(&values)?;
    Ok(())
}

/// From now on, when a page of a mapped file cannot be read because the file has become shorter or its disk fails, names the file on
/// standard error and ends the process with status 1. Without this the system ends it by SIGBUS, without a word. For programs; a library
/// leaves signals alone.
///
/// # Errors
/// [`Error::Io`] if the system refuses the handler.
pub fn report_shortened_files() -> Result<()> {
    let io = |cause| Error::Io { path: "SIGBUS".into(), cause };
    crate::sys::truncated::install().map_err(io)
}

/// A read-only mapping of a file, as a slice of bytes.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    /// `None` for an empty file, which cannot be mapped.
    bytes: Option<Mmap>,
}

impl MappedFile {
    /// Maps a regular file without reading it.
    ///
    /// # Errors
    /// [`Error::Io`] with the path: no such file, no permission, not a regular file.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |cause| Error::Io { path: path.to_owned(), cause };
        let file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            return Err(io(std::io::Error::other("not a regular file")));
        }
        let bytes =
            if metadata.len() == 0 { None } else { Some(crate::sys::mapped::map(&file).map_err(io)?) };
        Ok(Self { path: path.to_owned(), bytes })
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lets the system reclaim the memory of `range`. If touched again, it is read again.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a range beyond the end, [`Error::Io`] if the system refuses.
    pub fn forget(&self, range: std::ops::Range<usize>) -> Result<()> {
        if range.start > range.end || range.end > self.len() {
            return Err(Error::invalid(
                "forget",
                format!("the bytes {range:?} of {}, which has {}", self.path.display(), self.len()),
            ));
        }
        let io = |cause| Error::Io { path: self.path.clone(), cause };
        match &self.bytes {
            Some(bytes) if !range.is_empty() => crate::sys::mapped::forget(bytes, range).map_err(io),
            _ => Ok(()),
        }
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.as_deref().unwrap_or_default()
    }
}
