//! Bytes that are appended, and then read in any order: in memory up to a bound, in a file beyond it.
//!
//! The file has no name: it ends with the process, whatever ends that. It is read by position and not mapped, so that no page of it counts
//! in the process's memory.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes that are held before they are written to the file, once there is one.
const BUFFER: usize = 1 << 20;

/// Writes bytes. See the [module](self).
#[derive(Debug)]
pub(super) struct ByteWriter {
    held: Vec<u8>,
    file: Option<File>,
    written: u64,
    bound: usize,
    folder: PathBuf,
}

impl ByteWriter {
    /// Creates a writer that holds up to `bound` bytes, and makes its file in `folder`.
    pub(super) fn new(bound: usize, folder: PathBuf) -> Self {
        Self { held: Vec::new(), file: None, written: 0, bound, folder }
    }

    /// Returns the number of bytes.
    pub(super) fn len(&self) -> u64 {
        self.written + self.held.len() as u64
    }

    /// Appends bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) -> io::Result<()> {
        let bound = if self.file.is_some() { BUFFER } else { self.bound };
        if self.held.len() + bytes.len() > bound {
            self.flush()?;
        }
        self.held.extend_from_slice(bytes);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let named = |cause: io::Error| {
            let folder = self.folder.display();
            io::Error::new(cause.kind(), format!("a temporary file in {folder}: {cause}"))
        };
        let mut file = match self.file.take() {
            Some(file) => file,
            None => tempfile::tempfile_in(&self.folder).map_err(named)?,
        };
        file.write_all(&self.held).map_err(named)?;
        self.written += self.held.len() as u64;
        self.held = Vec::new();
        self.file = Some(file);
        Ok(())
    }

    /// Returns the bytes, to be read.
    pub(super) fn finish(mut self) -> io::Result<ByteStore> {
        if self.file.is_some() {
            self.flush()?;
        }
        Ok(match self.file {
            Some(file) => ByteStore::File { file: Arc::new(file), start: 0 },
            None => ByteStore::Memory(self.held),
        })
    }
}

/// Bytes to read.
#[derive(Debug)]
pub(super) enum ByteStore {
    Memory(Vec<u8>),
    /// From an offset of a file on.
    File {
        file: Arc<File>,
        start: u64,
    },
}

impl ByteStore {
    /// Fills `out` with the bytes at `at`.
    pub(super) fn read(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
        match self {
            Self::File { file, start } => file.read_exact_at(out, start + at),
            Self::Memory(bytes) => {
                let part = usize::try_from(at).ok().and_then(|at| bytes.get(at..at.checked_add(out.len())?));
                out.copy_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
                Ok(())
            }
        }
    }

    /// Passes `length` bytes from `at` on to `each`, in parts.
    pub(super) fn pass(
        &self,
        at: u64,
        length: u64,
        each: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut buffer = vec![0; length.min(BUFFER as u64) as usize];
        let (mut at, end) = (at, at + length);
        while at < end {
            let part = &mut buffer[..(end - at).min(BUFFER as u64) as usize];
            self.read(at, part)?;
            each(part)?;
            at += part.len() as u64;
        }
        Ok(())
    }
}
