//! Files and folders that appear whole: a reader, or a process that starts after a crash, sees the former content or the new
//! one, never a part or a mixture.
//!
//! - A [`file()`](file()) is written under a name of its own in the same folder, synced and renamed; then the folder is synced.
//! - Several files that belong together, such as an adapter's configuration and weights, are written into a [`Folder`] beside
//!   the one whose name they take. The two folders change names in one step (`renameat2` with `RENAME_EXCHANGE`), after the
//!   other entries of the former folder were linked into the new one. So of several writers the last wins, whole.
//!
//! Temporary names are `.NAME.RANDOM.new`, locked while they are written. What a killed process leaves behind is removed by
//! the next writer of that name.
//!
//! # Where the system cannot exchange folders
//! A mount point, this process's current folder, a folder whose parent may not be written, a file system without exchange or hard links: there the files
//! are renamed one by one, those by which a reader finds the others first away and last back. A reader then finds for a moment,
//! or after a crash, no content; never a mixture of one writer's files. Two writers at once are kept apart by a lock on the folder.
//!
//! ```
//! use std::fs;
//! use runtime::atomic_write;
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

mod folder;
mod temporary;

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

pub use folder::Folder;

/// Writes a file whole or not at all, in the place of the one that has the name.
///
/// # Errors
/// Those of `content`; a folder that is not there, may not be written, or is full: the former file is as it was.
pub fn file<T>(path: &Path, content: impl FnOnce(&mut dyn Write) -> io::Result<T>) -> io::Result<T> {
    let temporary = temporary::file(path)?;
    let mut out = BufWriter::new(temporary.as_file());
    let result = content(&mut out)?;
    out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
    // The handle, and with it the lock, lives until the file has its name.
    let _written = temporary.persist(path).map_err(|failed| failed.error)?;
    sync_folder(parent(path))?;
    Ok(result)
}

/// Makes a symbolic link to `target`, as it is read from the link's folder, in the place of what has the name. Where links need a
/// privilege, `link` becomes another name of `file`, which is what `target` leads to.
///
/// # Errors
/// A folder that is not there or may not be written.
pub fn link(link: &Path, target: &Path, file: &Path) -> io::Result<()> {
    temporary::link(link, target, file)?.persist(link).map_err(|failed| failed.error)?;
    sync_folder(parent(link))
}

/// Reads several files of a folder that [`Folder::publish`] may replace at the same time: `read` runs again where it did, so
/// what it returns is of one folder.
///
/// # Errors
/// Those of `read`.
pub fn read<T, E>(folder: &Path, mut read: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    loop {
        // The open handle keeps the folder's number from being given to another.
        let open = File::open(folder);
        let result = read();
        match open {
            Ok(open) if !is_at(&open, folder) => {}
            _ => return result,
        }
    }
}

/// Syncs a folder: a name in it is on the disk when the folder is.
///
/// # Errors
/// No such folder, or one that may not be read.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// The folder that a path lies in: `.` for a name alone.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether the open file or folder is still the one of this name.
#[cfg(unix)]
pub fn is_at(open: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;

    let of = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    open.metadata().ok().map(of).is_some_and(|open| std::fs::metadata(path).ok().map(of) == Some(open))
}

/// As on Unix; elsewhere an open file keeps its folder from being renamed.
#[cfg(not(unix))]
pub fn is_at(_: &File, path: &Path) -> bool {
    path.exists()
}
