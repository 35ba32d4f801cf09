//! A partially downloaded file.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use files::atomic_write;
use sha2::{Digest, Sha256};

use super::download::Chosen;

/// `blobs/NAME.part`, locked, with the SHA-256 of its bytes.
pub(super) struct PartialFile {
    path: PathBuf,
    file: File,
    /// Number of bytes received.
    pub(super) bytes: u64,
    hash: Sha256,
}

impl PartialFile {
    /// Opens the partial download of a blob; `None` if the blob is complete.
    pub(super) fn open(blob: &Path, file: &Chosen<'_>) -> io::Result<Option<Self>> {
        let path = blob.with_extension("part");
        fs::create_dir_all(atomic_write::parent(blob))?;
        let open = loop {
            let open = File::options().create(true).read(true).append(true).open(&path)?;
            // Waits for another process that fetches the same file.
            open.lock()?;
            if fs::metadata(blob).is_ok_and(|found| found.len() == file.size) {
                if atomic_write::is_at(&open, &path) {
                    fs::remove_file(&path)?;
                }
                return Ok(None);
            }
            // That process may have deleted an invalid file.
            if atomic_write::is_at(&open, &path) {
                break open;
            }
        };
        let mut part = Self { path, file: open, bytes: 0, hash: Sha256::new() };
        if part.file.metadata()?.len() > file.size {
            part.clear()?;
        }
        let mut buffer = vec![0; 1 << 20];
        loop {
            let count = part.file.read(&mut buffer)?;
            if count == 0 {
                return Ok(Some(part));
            }
            part.hash.update(&buffer[..count]);
            part.bytes += count as u64;
        }
    }

    /// Truncates the file, to start again.
    pub(super) fn clear(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.rewind()?;
        (self.bytes, self.hash) = (0, Sha256::new());
        Ok(())
    }

    /// Appends bytes.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Returns the SHA-256 of all bytes received, in hexadecimal.
    pub(super) fn sha256(&self) -> String {
        self.hash.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Deletes the file.
    pub(super) fn remove(self) {
        // A file that cannot be deleted is found invalid again.
        let _ = fs::remove_file(&self.path);
    }

    /// Syncs the file and renames it to the blob's name.
    pub(super) fn finish(self, blob: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.path, blob)?;
        atomic_write::sync_folder(atomic_write::parent(blob))
    }
}
