//! Memory-mapped files: opened instantly whatever their size, read page by page when touched.
//!
//! Its use is for weights and token stores, which are written once and then only read. A file must not be shortened or rewritten in place
//! while it is mapped (write a new one and rename it, as all of this project does): the operating system would end the process at
//! the first access to a removed page. A program can have the file named then ([`report_shortened_files`]).
//!
//! ```
//! use files::mapped::MappedFile;
//!
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("tokens.bin");
//! std::fs::write(&path, [1, 2, 3])?;
//! assert_eq!(MappedFile::open(&path)?[1..], [2, 3]);
//! # Ok::<(), std::io::Error>(())
//! ```

use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

use memmap2::{Mmap, UncheckedAdvice};

/// Installs a handler for mapped files whose pages cannot be read because the file has become shorter or its disk fails: it names the
/// file on standard error and ends the process with status 1. Without it the system ends the process by SIGBUS, without a message.
/// For programs; a library leaves signals alone.
///
/// # Errors
/// A system that refuses the handler.
pub fn report_shortened_files() -> io::Result<()> {
    crate::shortened::install()
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
    /// No such file, no permission, not a regular file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        let bytes = match metadata.len() {
            0 => None,
            // SAFETY: the mapping is private to this process and read only. Nobody shortens or rewrites the file meanwhile: a
            // requirement of all mapped files, which the module documents. The writers of this project make a new file and rename
            // it, which does not change an open mapping.
            _ => Some(unsafe { Mmap::map(&file) }?),
        };
        Ok(Self { path: path.to_owned(), bytes })
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lets the system reclaim the memory of `range`. If touched again, it is read again.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a range beyond the end; a system that refuses.
    pub fn forget(&self, range: Range<usize>) -> io::Result<()> {
        if range.start > range.end || range.end > self.len() {
            let (path, len) = (self.path.display(), self.len());
            let reason = format!("forget: the bytes {range:?} of {path}, which has {len}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        match &self.bytes {
            // SAFETY: the mapping is of a file and read only, so a freed page is read again with the same content.
            Some(bytes) if !range.is_empty() => unsafe {
                bytes.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len())
            },
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
