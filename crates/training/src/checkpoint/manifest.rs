//! The manifest: lists a checkpoint's files with their sizes and checksums.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// Version of the layout; raised when an older reader would misunderstand it.
const FORMAT: u32 = 1;
const NAME: &str = "manifest.json";
const CHECKSUM: &str = "manifest.sha256";

/// The files of a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    format: u32,
    pub(super) step: u64,
    files: BTreeMap<String, Entry>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    bytes: u64,
    sha256: String,
}

/// A writer that counts and hashes its bytes.
struct Hashing<W> {
    inner: W,
    hash: Sha256,
    bytes: u64,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(buffer)?;
        self.hash.update(&buffer[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Manifest {
    pub(super) fn new(step: u64) -> Self {
        Self { format: FORMAT, step, files: BTreeMap::new() }
    }

    /// Writes a file, syncs it and adds it to the list.
    pub(super) fn write(
        &mut self,
        folder: &Path,
        name: &str,
        content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        let inner = BufWriter::new(File::create_new(folder.join(name))?);
        let mut out = Hashing { inner, hash: Sha256::new(), bytes: 0 };
        content(&mut out)?;
        out.inner.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        self.files.insert(name.to_owned(), Entry { bytes: out.bytes, sha256: hex(out.hash) });
        Ok(())
    }

    /// Writes the manifest and its checksum.
    pub(super) fn finish(mut self, folder: &Path) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(&self)?;
        self.write(folder, NAME, |out| out.write_all(&text))?;
        let line = format!("{}  {NAME}\n", self.files[NAME].sha256);
        self.write(folder, CHECKSUM, |out| out.write_all(line.as_bytes()))
    }

    /// Returns the SHA-256 of a folder's manifest, as its checksum's file has it.
    pub(super) fn digest(folder: &Path) -> Result<String> {
        let path = folder.join(CHECKSUM);
        let line = std::fs::read_to_string(&path).map_err(|cause| Error::io(path, cause))?;
        Ok(line.split_whitespace().next().unwrap_or_default().to_owned())
    }

    /// Reads the manifest, checks that it lists exactly these files, and verifies each.
    pub(super) fn verify(folder: &Path, expected_files: &[&str]) -> Result<Self> {
        let path = folder.join(NAME);
        let text = std::fs::read(&path).map_err(|cause| Error::io(&path, cause))?;
        let of_checksum = folder.join(CHECKSUM);
        let line = std::fs::read(&of_checksum).map_err(|cause| Error::io(&of_checksum, cause))?;
        let expected = format!("{}  {NAME}\n", hex(Sha256::new_with_prefix(&text)));
        if line != expected.as_bytes() {
            let reason = format!("it does not match {CHECKSUM}; it was altered or truncated");
            return Err(Error::file(&path, reason));
        }
        let manifest: Self = serde_json::from_slice(&text)
            .map_err(|cause| Error::file(&path, format!("not a checkpoint manifest: {cause}")))?;
        if manifest.format != FORMAT {
            let reason = format!("format {}; this program reads format {FORMAT}", manifest.format);
            return Err(Error::file(&path, reason));
        }
        // An unlisted file would be read unchecked, and a listed path could lead anywhere.
        let listed: BTreeSet<&str> = manifest.files.keys().map(String::as_str).collect();
        if listed != expected_files.iter().copied().collect() {
            let reason = format!("it lists {listed:?}; expected {expected_files:?}");
            return Err(Error::file(&path, reason));
        }
        for (name, entry) in &manifest.files {
            entry.verify(&folder.join(name))?;
        }
        Ok(manifest)
    }
}

impl Entry {
    fn verify(&self, path: &Path) -> Result<()> {
        let io = |cause| Error::io(path, cause);
        let mut file = File::open(path).map_err(io)?;
        let bytes = file.metadata().map_err(io)?.len();
        if bytes != self.bytes {
            let what = if bytes < self.bytes { "truncated" } else { "longer than written" };
            return Err(Error::file(path, format!("{what}: {bytes} of {} bytes", self.bytes)));
        }
        let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
        loop {
            let read = file.read(&mut buffer).map_err(io)?;
            if read == 0 {
                break;
            }
            hash.update(&buffer[..read]);
        }
        let digest = hex(hash);
        if digest == self.sha256 {
            return Ok(());
        }
        let reason = format!(
            "altered: its SHA-256 is {}…, but the manifest says {}…",
            &digest[..12],
            self.sha256.chars().take(12).collect::<String>()
        );
        Err(Error::file(path, reason))
    }
}
