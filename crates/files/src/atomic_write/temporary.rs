//! Unique temporary names, and the removal of those whose writer is dead.
//!
//! A writer holds a lock on its temporary file or folder until its process ends, so an unlocked one belongs to a dead writer. A
//! writer may lose its name before it has locked it; it detects that and takes another name.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use tempfile::{Builder, NamedTempFile, TempDir, TempPath};

use super::{access, is_at, parent};

/// Temporary files and folders of this process; those that have got their names are no longer there.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

const SUFFIX: &str = ".new";
/// Letters of a unique name.
const RANDOM: usize = 8;

/// Creates a locked file beside `path`.
pub(super) fn file(path: &Path) -> io::Result<NamedTempFile> {
    let (folder, prefix) = (parent(path), prefix(path)?);
    remove_leftovers(folder, &prefix);
    loop {
        let made = noted(|| builder(&prefix, access::mode(path, 0o666)).tempfile_in(folder))?;
        if lock(made.as_file())? && is_at(made.as_file(), made.path()) {
            // Before it has a content.
            access::keep_access(path, made.path())?;
            return Ok(made);
        }
    }
}

/// Creates a link beside `path`. A dead writer's link stays, because links have no locks.
pub(super) fn link(path: &Path, target: &Path, file: &Path) -> io::Result<TempPath> {
    let made = builder(&prefix(path)?, 0o666).make_in(parent(path), |made| symlink(target, made, file))?;
    Ok(made.into_temp_path())
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path, _: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(not(unix))]
fn symlink(_: &Path, link: &Path, file: &Path) -> io::Result<()> {
    fs::hard_link(file, link)
}

/// Creates a folder in `folder` that will become `target`, and its lock.
pub(super) fn folder(folder: &Path, target: &Path) -> io::Result<(TempDir, File)> {
    let prefix = prefix(target)?;
    remove_leftovers(folder, &prefix);
    loop {
        let made = noted(|| builder(&prefix, access::mode(target, 0o777) | 0o700).tempdir_in(folder))?;
        // Another writer may have removed it before it was locked.
        let open = match File::open(made.path()) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => continue,
            open => open?,
        };
        if lock(&open)? && is_at(&open, made.path()) {
            return Ok((made, open));
        }
    }
}

/// Makes a temporary file or folder, and notes it before [`remove_unfinished`] can pass it over.
fn noted<T: AsRef<Path>>(make: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let mut unfinished = UNFINISHED.lock();
    let made = make()?;
    unfinished.retain(|path| path.exists());
    unfinished.push(made.as_ref().to_owned());
    Ok(made)
}

/// Removes what this process has not finished, as far as possible. From then on none is made: a thread that makes one waits, because the
/// process takes some time to end.
pub(super) fn remove_unfinished() {
    let mut unfinished = UNFINISHED.lock();
    for path in unfinished.drain(..) {
        let _ = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
    }
    std::mem::forget(unfinished);
}

/// Waits for the lock; false on a file system without locks, where leftovers cannot be recognised.
pub(super) fn lock(file: &File) -> io::Result<bool> {
    match file.lock() {
        Err(cause) if cause.kind() != io::ErrorKind::Unsupported => Err(cause),
        _ => Ok(true),
    }
}

fn prefix(path: &Path) -> io::Result<OsString> {
    let name = path.file_name().ok_or_else(|| {
        let reason = format!("{} ends without a name; give a file's or folder's own name", path.display());
        io::Error::new(io::ErrorKind::InvalidInput, reason)
    })?;
    Ok([OsStr::new("."), name, OsStr::new(".")].into_iter().collect())
}

fn builder<'a>(prefix: &'a OsStr, mode: u32) -> Builder<'a, 'static> {
    let mut builder = Builder::new();
    builder.prefix(prefix).suffix(SUFFIX).rand_bytes(RANDOM);
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(mode));
    #[cfg(not(unix))]
    let _ = mode;
    builder
}

/// Removes what dead writers of this name left, as far as possible.
fn remove_leftovers(folder: &Path, prefix: &OsStr) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        let is_ours = name.as_encoded_bytes().strip_prefix(prefix.as_encoded_bytes()).is_some_and(|rest| {
            rest.strip_suffix(SUFFIX.as_bytes())
                .is_some_and(|random| random.len() == RANDOM && random.iter().all(u8::is_ascii_alphanumeric))
        });
        // A link is never a temporary file.
        if !is_ours || entry.file_type().is_ok_and(|kind| kind.is_symlink()) {
            continue;
        }
        let Ok(open) = File::open(&path) else { continue };
        if open.try_lock().is_ok() && is_at(&open, &path) {
            let _ = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        }
    }
}
