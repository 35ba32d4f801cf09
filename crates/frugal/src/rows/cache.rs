//! Prepared rows in files, so that the same data are tokenized once.
//!
//! The name of a file is a digest of everything that the rows depend on: the bytes of the data, the tokenizer, the chat template with
//! its variables and date, the mask, the lengths, the special tokens, and [`VERSION`]. So rows of other data or of another model are
//! never taken. A file holds a mark, the SHA-256 of what follows, the counts as JSON, and the rows as [`MaskedRows`] stores them, which are
//! read from it as they are needed; a damaged file is made again. The newest [`KEPT`] files are kept. Only the user may read them.

use std::fs;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use dataloading::records::Detected;
use serde_json::json;
use sha2::{Digest, Sha256};
use training::masked_rows::MaskedRows;

use super::counts::{Counts, Rows};
use super::encoder::RowEncoder;
use crate::error::{Error, Result};

/// Version of how rows are made. Increased when the same data and options give other rows, or other notes, than before.
const VERSION: u32 = 6;
const MARK: [u8; 8] = *b"FRGLROW3";
/// Bytes of a digest.
const DIGEST: usize = 32;
/// Files that are kept.
const KEPT: usize = 32;

/// Returns the folder of prepared rows: `rows` in `FRUGAL_CACHE`, else in the user's cache folder; `None` if there is neither.
pub fn folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("FRUGAL_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("frugal")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/frugal")))?;
    Some(cache.join("rows"))
}

/// Returns the name of the file with the rows of some data.
///
/// # Errors
/// A file that cannot be read; a tokenizer that cannot be written.
pub(super) fn key(
    files: &[PathBuf],
    encoder: &RowEncoder,
    detected: &Detected,
    limit: Option<usize>,
) -> Result<String> {
    let options = encoder.options();
    let formats: Vec<String> = detected.formats.iter().map(|(format, _)| format.to_string()).collect();
    let settings = json!({
        "version": VERSION,
        "longest": options.longest,
        "overlong": options.overlong,
        "mask": options.mask,
        "begin": options.begin,
        "end": options.end,
        "vocabulary": options.vocabulary,
        "field": options.field,
        "templates": options.templates.as_ref().map(|templates| format!("{templates:?}")),
        "ends": encoder.model_ends(),
        "template": encoder.template().map(dataloading::chat::ChatTemplate::identity),
        "formats": formats,
        "limit": limit,
    });
    let mut digest = Sha256::new();
    for part in [settings.to_string(), encoder.tokenizer().to_json()?] {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    for path in files {
        let failed = |cause: io::Error| Error::File { path: path.clone(), reason: cause.to_string() };
        let extension = path.extension().unwrap_or_default().to_string_lossy().into_owned();
        digest.update((extension.len() as u64).to_le_bytes());
        digest.update(extension);
        digest.update(digest_of(path).map_err(failed)?);
    }
    Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Returns the SHA-256 of a file in hexadecimal.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn hex_digest_of(path: &Path) -> io::Result<String> {
    Ok(digest_of(path)?.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn digest_of(path: &Path) -> io::Result<[u8; DIGEST]> {
    rest_of(&mut fs::File::open(path)?)
}

/// The digest of a file from its position on.
fn rest_of(file: &mut fs::File) -> io::Result<[u8; DIGEST]> {
    let (mut digest, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(digest.finalize().into()),
            count => digest.update(&buffer[..count]),
        }
    }
}

/// Reads the rows of a file; `None` if it does not exist or is damaged.
pub(super) fn read(path: &Path) -> Option<Rows> {
    let mut file = fs::File::open(path).ok()?;
    let mut mark = [0; MARK.len() + DIGEST];
    file.read_exact(&mut mark).ok()?;
    let digest = mark.strip_prefix(&MARK)?;
    if rest_of(&mut file).ok()? != *digest {
        return None;
    }
    file.seek(SeekFrom::Start(mark.len() as u64)).ok()?;
    let mut length = [0; 4];
    file.read_exact(&mut length).ok()?;
    let mut header = vec![0; u32::from_le_bytes(length) as usize];
    file.read_exact(&mut header).ok()?;
    let start = file.stream_position().ok()?;
    let counts: Counts = serde_json::from_slice(&header).ok()?;
    Some(Rows { rows: MaskedRows::read_file(file, start).ok()?, counts })
}

/// Creates a folder that only the user may enter.
pub(super) fn create(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
        builder.mode(0o700).create(folder)?;
        // Of an earlier version, or made by hand.
        if fs::metadata(folder)?.permissions().mode() & 0o077 != 0 {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o700))?;
        }
    }
    builder.create(folder)
}

/// Writes rows, and removes the oldest files beyond the number that is kept.
///
/// # Errors
/// A folder that cannot be written or is full.
pub(super) fn write(path: &Path, rows: &Rows) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    create(folder)?;
    let mut digest = Digesting(Sha256::new());
    content(rows, &mut digest)?;
    files::atomic_write::file(path, |out: &mut dyn Write| {
        out.write_all(&MARK)?;
        out.write_all(&digest.0.finalize())?;
        content(rows, out)
    })?;
    #[cfg(unix)]
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    let mut files: Vec<_> = fs::read_dir(folder)?
        .flatten()
        .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "rows"))
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    files.sort();
    for (_, old) in files.iter().rev().skip(KEPT) {
        // Another process may have removed it.
        let _ = fs::remove_file(old);
    }
    Ok(())
}

/// A digest of what is written to it.
struct Digesting(Sha256);

impl Write for Digesting {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes the content of a file.
fn content(rows: &Rows, out: &mut dyn Write) -> io::Result<()> {
    let header = serde_json::to_vec(&rows.counts)?;
    let length = u32::try_from(header.len()).map_err(io::Error::other)?;
    out.write_all(&length.to_le_bytes())?;
    out.write_all(&header)?;
    rows.rows.write(out)
}

#[cfg(test)]
mod tests {
    use dataloading::IGNORE_INDEX;
    use training::masked_rows::MaskedRow;

    use super::*;

    #[test]
    fn rows_are_read_as_they_were_written_and_damaged_files_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/a.rows");
        let row = |tokens: &[i64], learned: usize| {
            let label = |(at, id): (usize, &i64)| if at < learned { IGNORE_INDEX } else { *id };
            MaskedRow::new(tokens.to_vec(), (0..).zip(tokens).map(label).collect())
        };
        let rows = vec![row(&[5, 151_643, 0], 1), row(&[], 0), row(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 8)];
        let rows = MaskedRows::of(&rows).unwrap();
        let rows = Rows { rows, counts: Counts { records: 4, skipped: 1, ..Counts::default() } };
        assert_eq!(read(&path), None);
        write(&path, &rows).unwrap();
        assert_eq!(read(&path), Some(rows.clone()));
        let content = fs::read(&path).unwrap();
        for at in 0..content.len() {
            let mut bytes = content.clone();
            bytes[at] ^= 4;
            fs::write(&path, &bytes).unwrap();
            assert_eq!(read(&path), None, "{at}");
            fs::write(&path, &content[..at]).unwrap();
            assert_eq!(read(&path), None, "{at}");
        }
        for number in 0..KEPT + 3 {
            write(&folder.path().join(format!("new/{number}.rows")), &rows).unwrap();
        }
        assert_eq!(fs::read_dir(folder.path().join("new")).unwrap().count(), KEPT);
        assert!(read(&folder.path().join(format!("new/{}.rows", KEPT + 2))).is_some(), "the newest are kept");
    }
}
