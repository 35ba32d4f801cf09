//! Atomic writes of files and folders: a reader, or a process that starts after a crash, sees the old content or the new one, never
//! a part or a mixture.
//!
//! - A [`file()`](file()) is written under a unique name in the same folder, synced and renamed; then the folder is synced.
//! - Several files that belong together, such as an adapter's configuration and weights, are written into a [`Folder`] beside the
//!   one that they replace. The two folders exchange names in one step (`renameat2` with `RENAME_EXCHANGE`), after the other
//!   entries of the old folder were linked into the new one. Of several writers, the last one wins completely.
//!
//! A replacement takes on the mode of what it replaces, and where the system permits it its owner ([`keep_access`]); a new file
//! has the mode that the user's mask allows.
//!
//! Temporary names are `.NAME.RANDOM.new`, locked while they are written. The next writer of a name removes what a killed process
//! left.
//!
//! # If the system cannot exchange folders
//! This concerns a mount point, this process's current folder, a folder whose parent is not writable, and a file system without
//! exchange or hard links. The files are then renamed one by one; those by which a reader finds the others are removed first and
//! added last. For a moment, or after a crash, a reader may find no content, but never a mixture of two writers' files. A lock on
//! the folder excludes concurrent writers.
//!
//! ```
//! use std::fs;
//! use files::atomic_write;
//!
//! let place = tempfile::tempdir()?;
//! let path = place.path().join("names.txt");
//! atomic_write::file(&path, |out| out.write_all(b"a\n"))?;
//! assert_eq!(fs::read(&path)?, b"a\n");
//!
//! let target = place.path().join("adapter");
//! let new = atomic_write::Folder::beside(&target)?;
//! fs::write(new.path().join("config"), "r = 8")?;
//! fs::write(new.path().join("weights"), "1 2 3")?;
//! new.publish(&["config"], &|_| false)?;
//! let read = |name| fs::read_to_string(target.join(name));
//! let both = atomic_write::read(&target, || Ok::<_, std::io::Error>((read("config")?, read("weights")?)))?;
//! assert_eq!(both, ("r = 8".to_owned(), "1 2 3".to_owned()));
//! # Ok::<(), std::io::Error>(())
//! ```

mod access;
mod folder;
mod temporary;

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

pub use access::keep_access;
pub use folder::Folder;

/// Writes a file atomically, replacing an existing one, whose mode it keeps ([`keep_access`]).
///
/// # Errors
/// Errors of `content`; a folder that does not exist, is not writable, or is full. The old file is then unchanged.
pub fn file<T>(path: &Path, content: impl FnOnce(&mut dyn Write) -> io::Result<T>) -> io::Result<T> {
    checked_file(path, content, |_| Ok(()))
}

/// Writes a file as [`file()`](file()) does, and gives it its name only after `check`, which reads it under a temporary one.
///
/// # Errors
/// Same as [`file()`](file()); errors of `check`. The old file is then unchanged.
pub fn checked_file<T>(
    path: &Path,
    content: impl FnOnce(&mut dyn Write) -> io::Result<T>,
    check: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<T> {
    let temporary = temporary::file(path)?;
    let mut out = BufWriter::new(temporary.as_file());
    let result = content(&mut out)?;
    out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
    check(temporary.path())?;
    // The handle holds the lock until the file has its name.
    let _written = temporary.persist(path).map_err(|failed| failed.error)?;
    sync_folder(parent(path))?;
    Ok(result)
}

/// Writes a file as [`file()`](file()) does, without waiting for the disk: for content that can be made again.
///
/// # Errors
/// Same as [`file()`](file()).
pub fn unsynced(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut temporary = temporary::file(path)?;
    temporary.write_all(content)?;
    temporary.persist(path).map_err(|failed| failed.error).map(drop)
}

/// Removes the temporary files and folders of all writes that this process has not finished, as far as possible: for a handler of a signal
/// that ends the process. What was there under the final names stays. From then on a thread that begins a write waits.
pub fn remove_unfinished() {
    temporary::remove_unfinished();
}

/// Creates a symbolic link to `target`, relative to the link's folder, replacing what has the name. If links need a privilege,
/// `link` becomes another name of `file`, the file that `target` points to.
///
/// # Errors
/// A folder that does not exist or is not writable.
pub fn link(link: &Path, target: &Path, file: &Path) -> io::Result<()> {
    temporary::link(link, target, file)?.persist(link).map_err(|failed| failed.error)?;
    sync_folder(parent(link))
}

/// Reads several files of a folder that [`Folder::publish`] may replace at the same time: `read` runs again if it did, so that its
/// result is from one folder.
///
/// # Errors
/// Errors of `read`.
pub fn read<T, E>(folder: &Path, mut read: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    loop {
        // The open handle prevents reuse of the folder's inode number.
        let open = File::open(folder);
        let result = read();
        match open {
            Ok(open) if !is_at(&open, folder) => {}
            _ => return result,
        }
    }
}

/// Syncs a folder, which makes the names in it durable.
///
/// # Errors
/// No such folder, or one that is not readable.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Returns the folder that contains a path: `.` for a name alone.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns whether the open file or folder is still the one of this name.
#[cfg(unix)]
pub fn is_at(open: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;

    let inode = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    open.metadata().ok().map(inode).is_some_and(|open| std::fs::metadata(path).ok().map(inode) == Some(open))
}

/// Returns whether the name exists: on other systems than Unix an open file prevents renaming its folder.
#[cfg(not(unix))]
pub fn is_at(_: &File, path: &Path) -> bool {
    path.exists()
}
