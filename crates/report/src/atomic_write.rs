//! Atomic file writes.

use std::io::{self, Write};
use std::path::Path;

/// Writes a file under a temporary name beside it and renames it: a reader sees the old content or the new, and of two
/// concurrent writers one wins whole. The mode of an existing file stays. The file is not synced to disk, since its content can be made again.
///
/// # Errors
/// A folder that is not there, may not be written, or is full; the former file is as it was.
pub fn atomic_write(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    builder.prefix(".").suffix(".new");
    let replaced = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file);
    #[cfg(unix)]
    builder.permissions(match &replaced {
        Some(replaced) => replaced.permissions(),
        None => std::os::unix::fs::PermissionsExt::from_mode(0o666),
    });
    let mut file = builder.tempfile_in(folder)?;
    if let Some(replaced) = replaced {
        // Bits that the user's mask has taken away. A file system without modes refuses them.
        let _ = file.as_file().set_permissions(replaced.permissions());
    }
    file.write_all(content)?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_private_page_stays_private() {
        use std::os::unix::fs::PermissionsExt;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page.html");
        atomic_write(&path, b"first").unwrap();
        for mode in [0o600, 0o664] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            atomic_write(&path, b"second").unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
        }
    }

    #[test]
    fn what_is_there_is_replaced_whole_and_stays_where_it_cannot_be() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page.html");
        for content in ["a long first page", "short"] {
            atomic_write(&path, content.as_bytes()).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        }
        assert!(atomic_write(&folder.path().join("absent/page.html"), b"x").is_err());
        std::fs::create_dir(folder.path().join("taken")).unwrap();
        assert!(atomic_write(&folder.path().join("taken"), b"x").is_err());
        let left: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(left.len(), 2, "no temporary file stays: {left:?}");
    }
}
