//! Permissions of a replacement: those of the replaced file, so that a private file stays private.

use std::fs;
use std::io;
use std::path::Path;

/// Returns the permission bits of a new file or folder: the bits of what it replaces, within `new`; or `new` alone, from which the user's
/// mask takes some away.
#[cfg(unix)]
pub(super) fn mode(replaced: &Path, new: u32) -> u32 {
    use std::os::unix::fs::MetadataExt;

    fs::metadata(replaced).map_or(new, |replaced| replaced.mode() & new)
}

#[cfg(not(unix))]
pub(super) fn mode(_: &Path, new: u32) -> u32 {
    new
}

/// Gives `new` the mode of `replaced`, which it is about to replace, and as far as the system permits its owner and group; in a folder, each
/// entry those of its namesake. Does nothing where nothing is replaced, or where the file system has no modes.
///
/// # Errors
/// A folder that cannot be read.
pub fn keep_access(replaced: &Path, new: &Path) -> io::Result<()> {
    let (Ok(from), Ok(to)) = (fs::metadata(replaced), fs::symlink_metadata(new)) else { return Ok(()) };
    if from.is_dir() != to.is_dir() || to.is_symlink() {
        return Ok(());
    }
    if to.is_dir() {
        for entry in fs::read_dir(new)? {
            let entry = entry?;
            keep_access(&replaced.join(entry.file_name()), &entry.path())?;
        }
    }
    set(&from, new);
    Ok(())
}

/// Sets the owner first, because that may clear bits of the mode.
#[cfg(unix)]
pub(super) fn set(from: &fs::Metadata, new: &Path) {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

    let group = |path: &Path| fs::symlink_metadata(path).map(|now| now.gid());
    let is_owned = |path: &Path| {
        fs::symlink_metadata(path).is_ok_and(|now| (now.uid(), now.gid()) == (from.uid(), from.gid()))
    };
    if !is_owned(new) && chown(new, Some(from.uid()), Some(from.gid())).is_err() {
        // Only root gives files away; a member of the group may keep that.
        let _ = chown(new, None, Some(from.gid()));
    }
    let mut mode = from.mode() & 0o777;
    if group(new).ok() != Some(from.gid()) {
        // Another group gets no more than everybody.
        mode &= !0o070 | (mode & 0o007) << 3;
    }
    let _ = fs::set_permissions(new, fs::Permissions::from_mode(mode));
}

#[cfg(not(unix))]
pub(super) fn set(from: &fs::Metadata, new: &Path) {
    let _ = fs::set_permissions(new, from.permissions());
}
