//! Atomic placement of a finished store, and recovery from an interrupted replacement.
//!
//! Not every platform can swap two folders in one step. So the former store is renamed to `.NAME.replaced`, the new store
//! takes the name, and the former is removed. If the second step fails, the first is undone; if the process ends between
//! them, the next writer of that name undoes it, and opening the store is an error that names the replacement.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::{file, header, io};
use crate::error::Result;

/// Returns `.NAME.extension` beside the folder `NAME`, which need not be UTF-8; `None` for a path without a name.
pub(super) fn hidden(path: &Path, extension: &str) -> Option<PathBuf> {
    let mut hidden = OsString::from(".");
    hidden.push(path.file_name()?);
    hidden.push(".");
    hidden.push(extension);
    Some(parent(path).join(hidden))
}

/// Returns the path of the former store at `path` during a replacement.
pub(super) fn aside(path: &Path) -> Option<PathBuf> {
    hidden(path, "replaced")
}

/// Checks that a store may be written to `path`.
pub(super) fn check_target(path: &Path, replace: bool) -> Result<()> {
    let there = std::fs::symlink_metadata(path).is_ok();
    if !there {
        return Ok(());
    }
    if !replace {
        return Err(file(path, "the path exists; remove it, choose another name, or allow replacement"));
    }
    if !path.join(header::shard_name(0)).is_file() {
        return Err(file(
            path,
            "the path exists and is not a token store, so it is not replaced; choose another name",
        ));
    }
    Ok(())
}

/// Renames the folder `partial` to `target`. An existing `target` is moved to `aside`, and moved back if the rename fails.
pub(super) fn place(partial: &Path, target: &Path, aside: &Path) -> Result<()> {
    let replaces = std::fs::symlink_metadata(target).is_ok();
    if replaces {
        files::atomic_write::keep_access(target, partial).map_err(|cause| io(partial, cause))?;
        remove_folder(aside)?;
        std::fs::rename(target, aside).map_err(|cause| io(target, cause))?;
    }
    std::fs::rename(partial, target).map_err(|cause| {
        if replaces {
            // If this fails too, the next writer tries again.
            let _ = std::fs::rename(aside, target);
        }
        io(target, cause)
    })
}

/// Finishes or undoes an interrupted replacement: restores a former store without a successor, removes one with a
/// successor. The caller must hold the writer's lock.
pub(super) fn recover(target: &Path, aside: &Path) -> Result<()> {
    if std::fs::symlink_metadata(aside).is_err() {
        return Ok(());
    }
    if std::fs::symlink_metadata(target).is_ok() {
        return remove_folder(aside);
    }
    std::fs::rename(aside, target).map_err(|cause| io(target, cause))
}

pub(super) fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

pub(super) fn remove_folder(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => Err(io(path, cause)),
        _ => Ok(()),
    }
}

/// Syncs a folder, so that a rename in it is durable.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(|cause| io(path, cause))
}

/// Returns whether the open file is still the one at `path`: renaming a folder moves its open files along.
#[cfg(unix)]
pub(super) fn is_at(open: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;

    let inode = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    open.metadata().ok().map(inode).is_some_and(|open| std::fs::metadata(path).ok().map(inode) == Some(open))
}

/// Returns whether `path` exists: outside Unix a folder with an open file cannot be renamed.
#[cfg(not(unix))]
pub(super) fn is_at(_: &File, path: &Path) -> bool {
    path.exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a folder with one file of these words.
    fn folder(path: &Path, words: &str) {
        std::fs::create_dir(path).unwrap();
        std::fs::write(path.join("words"), words).unwrap();
    }

    fn words(path: &Path) -> String {
        std::fs::read_to_string(path.join("words")).unwrap()
    }

    #[test]
    fn a_failed_replacement_keeps_the_old_store() {
        let root = tempfile::tempdir().unwrap();
        let [partial, target, aside] = ["partial", "target", "aside"].map(|name| root.path().join(name));
        folder(&target, "former");
        // The source does not exist.
        let error = place(&partial, &target, &aside).unwrap_err().to_string();
        assert!(error.contains("target: "), "{error}");
        assert_eq!(words(&target), "former");
        assert!(!aside.exists());

        folder(&partial, "new");
        place(&partial, &target, &aside).unwrap();
        assert_eq!((words(&target), words(&aside)), ("new".into(), "former".into()));
        // The state of a process that ended here.
        recover(&target, &aside).unwrap();
        assert_eq!(words(&target), "new");
        assert!(!aside.exists());
    }

    #[cfg(unix)]
    #[test]
    fn a_moved_open_file_is_detected() {
        let root = tempfile::tempdir().unwrap();
        let (here, there) = (root.path().join("here"), root.path().join("there"));
        folder(&here, "one");
        let open = File::open(here.join("words")).unwrap();
        assert!(is_at(&open, &here.join("words")));
        std::fs::rename(&here, &there).unwrap();
        assert!(!is_at(&open, &here.join("words")));
        folder(&here, "another");
        assert!(!is_at(&open, &here.join("words")));
    }
}
