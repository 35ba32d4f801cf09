//! Several files that become visible together.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::{access, is_at, parent, sync_folder, temporary};

/// A folder that is filled under a temporary name. It is removed if dropped before [`Folder::publish`].
#[derive(Debug)]
pub struct Folder {
    target: PathBuf,
    stage: TempDir,
    /// Whether it is beside the target, and not in it.
    is_beside: bool,
    /// Tells other writers that this one is alive; after the exchange it blocks the next one that publishes.
    _lock: File,
}

impl Folder {
    /// Creates an empty folder that becomes `target`, and missing parent folders. If `target` exists, its content is replaced. A
    /// link to a folder stays a link, to the same folder's name.
    ///
    /// # Errors
    /// `target` is a file, or has no name; a folder that cannot be created.
    pub fn beside(target: &Path) -> io::Result<Self> {
        let target = match fs::metadata(target) {
            Ok(metadata) if !metadata.is_dir() => {
                return Err(io::Error::new(io::ErrorKind::NotADirectory, "a file; expected a folder"));
            }
            Ok(_) => fs::canonicalize(target)?,
            Err(_) => {
                fs::create_dir_all(parent(target))?;
                target.to_owned()
            }
        };
        let holder = parent(&target);
        // Nothing can be renamed from beside a mount point into it; a process whose current folder is exchanged is left in a
        // removed one.
        let is_current = || std::env::current_dir().is_ok_and(|current| current.starts_with(&target));
        let beside = if is_mount_point(&target) || is_current() {
            Err(io::ErrorKind::CrossesDevices.into())
        } else {
            temporary::folder(holder, &target)
        };
        let is_beside = beside.is_ok();
        let (stage, lock) = match beside {
            Err(cause) if target.is_dir() && is_unsupported(&cause) => temporary::folder(&target, &target)?,
            beside => beside?,
        };
        Ok(Self { target, stage, is_beside, _lock: lock })
    }

    /// Returns the folder to write to.
    pub fn path(&self) -> &Path {
        self.stage.path()
    }

    /// Syncs what was written and gives the folder its name. Entries of an existing folder of that name are kept, except those that
    /// were rewritten and those for which `is_former` is true: files of the old content that the new one lacks. `marks` are the
    /// files by which a reader finds the others; they matter if folders cannot be exchanged (see the [module](super)).
    ///
    /// # Errors
    /// Errors of the file system. The old content is then unchanged; or, if folders cannot be exchanged and renaming failed halfway,
    /// it lacks its `marks`.
    pub fn publish(self, marks: &[&str], is_former: &dyn Fn(&str) -> bool) -> io::Result<()> {
        for entry in fs::read_dir(self.path())? {
            let entry = entry?;
            access::keep_access(&self.target.join(entry.file_name()), &entry.path())?;
        }
        let mut written = Vec::new();
        for entry in fs::read_dir(self.path())? {
            let entry = entry?;
            File::open(entry.path())?.sync_all()?;
            written.push(entry.file_name());
        }
        sync_folder(self.path())?;
        loop {
            // The existing folder is locked first, so that writers publish one after the other.
            let former = match File::open(&self.target) {
                Ok(former) => former,
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => match self.take_free_name() {
                    Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => continue,
                    taken => return taken,
                },
                Err(cause) => return Err(cause),
            };
            temporary::lock(&former)?;
            if !is_at(&former, &self.target) {
                continue;
            }
            return match self.exchange(is_former) {
                Err(cause) if is_unsupported(&cause) => self.rename_each(written, marks, is_former),
                exchanged => exchanged,
            };
        }
    }

    /// Publishes under a name that does not exist yet.
    fn take_free_name(&self) -> io::Result<()> {
        match rename_to_free(self.path(), &self.target) {
            // A plain rename replaces at most an empty folder.
            Err(cause) if is_unsupported(&cause) => fs::rename(self.path(), &self.target)?,
            renamed => renamed?,
        }
        sync_folder(parent(&self.target))
    }

    /// Exchanges the names of the new and the old folder, after linking the old one's other entries into the new one.
    fn exchange(&self, is_former: &dyn Fn(&str) -> bool) -> io::Result<()> {
        if !self.is_beside {
            return Err(io::ErrorKind::CrossesDevices.into());
        }
        link_missing(&self.target, self.path(), is_former)?;
        access::set(&fs::metadata(&self.target)?, self.path());
        sync_folder(self.path())?;
        exchange_names(self.path(), &self.target)?;
        // Entries that were added to the old folder meanwhile.
        link_missing(self.path(), &self.target, is_former)?;
        sync_folder(parent(&self.target))
    }

    /// Renames the written files into the old folder; marks are removed first and added last.
    fn rename_each(
        &self,
        mut written: Vec<OsString>,
        marks: &[&str],
        is_former: &dyn Fn(&str) -> bool,
    ) -> io::Result<()> {
        for mark in marks {
            remove(&self.target.join(mark))?;
        }
        sync_folder(&self.target)?;
        for entry in fs::read_dir(&self.target)? {
            let name = entry?.file_name();
            if name.to_str().is_some_and(is_former) {
                remove(&self.target.join(name))?;
            }
        }
        written.sort_by_key(|name| marks.iter().any(|mark| name == mark));
        for name in written {
            if marks.iter().any(|mark| name == *mark) {
                sync_folder(&self.target)?;
            }
            fs::rename(self.path().join(&name), self.target.join(&name))?;
        }
        sync_folder(&self.target)
    }
}

/// Hard-links every entry of `from` that `to` lacks, at any depth. `is_left_out` decides about the entries of `from` itself.
fn link_missing(from: &Path, to: &Path, is_left_out: &dyn Fn(&str) -> bool) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (kind, name) = (entry.file_type()?, entry.file_name());
        let (from, to) = (entry.path(), to.join(&name));
        if name.to_str().is_some_and(is_left_out) {
            continue;
        }
        let linked = if kind.is_dir() {
            if !to.is_dir() {
                fs::create_dir(&to)?;
                access::set(&entry.metadata()?, &to);
            }
            link_missing(&from, &to, &|_| false)
        } else if fs::symlink_metadata(&to).is_ok() {
            Ok(())
        } else {
            link(&from, &to, kind.is_symlink())
        };
        match linked {
            // Another process was faster, or has removed it.
            Err(cause) if matches!(cause.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound) => {}
            linked => linked?,
        }
    }
    Ok(())
}

fn remove(file: &Path) -> io::Result<()> {
    match fs::remove_file(file) {
        Err(cause) if cause.kind() != io::ErrorKind::NotFound => Err(cause),
        _ => Ok(()),
    }
}

/// Returns whether renaming file by file may work although exchanging folders failed with this error.
fn is_unsupported(cause: &io::Error) -> bool {
    use io::ErrorKind::{
        CrossesDevices, InvalidInput, PermissionDenied, ReadOnlyFilesystem, ResourceBusy, TooManyLinks,
        Unsupported,
    };

    matches!(
        cause.kind(),
        CrossesDevices
            | InvalidInput
            | PermissionDenied
            | ReadOnlyFilesystem
            | ResourceBusy
            | TooManyLinks
            | Unsupported
    )
}

#[cfg(unix)]
fn link(from: &Path, to: &Path, is_symlink: bool) -> io::Result<()> {
    if is_symlink {
        return std::os::unix::fs::symlink(fs::read_link(from)?, to);
    }
    fs::hard_link(from, to)
}

#[cfg(not(unix))]
fn link(from: &Path, to: &Path, _: bool) -> io::Result<()> {
    fs::hard_link(from, to)
}

#[cfg(unix)]
fn is_mount_point(folder: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;

    let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev()).ok();
    folder.is_dir() && (folder.parent().is_none() || device(folder) != device(parent(folder)))
}

#[cfg(not(unix))]
fn is_mount_point(_: &Path) -> bool {
    false
}

#[cfg(any(target_os = "linux", target_os = "macos"))]
fn rename_to_free(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};

    Ok(renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
}

#[cfg(any(target_os = "linux", target_os = "macos"))]
fn exchange_names(one: &Path, other: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};

    Ok(renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?)
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn rename_to_free(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn exchange_names(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(folder: &Path) -> Vec<(String, String)> {
        let mut all: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .map(|path| {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                (name, fs::read_to_string(&path).unwrap_or_else(|_| "folder".to_owned()))
            })
            .collect();
        all.sort();
        all
    }

    /// Returns a folder with old content, and a new one that is ready to publish.
    fn prepared(root: &Path) -> (PathBuf, Folder) {
        let target = root.join("target");
        fs::create_dir_all(target.join("sub")).unwrap();
        for (name, word) in
            [("mark", "former"), ("values", "former"), ("part-2", "former"), ("notes", "kept")]
        {
            fs::write(target.join(name), word).unwrap();
        }
        fs::write(target.join("sub/notes"), "kept").unwrap();
        let new = Folder::beside(&target).unwrap();
        fs::write(new.path().join("mark"), "new").unwrap();
        fs::write(new.path().join("values"), "new").unwrap();
        (target, new)
    }

    fn is_part(name: &str) -> bool {
        name.starts_with("part-")
    }

    fn expected() -> Vec<(String, String)> {
        [("mark", "new"), ("notes", "kept"), ("sub", "folder"), ("values", "new")]
            .map(|(name, word)| (name.to_owned(), word.to_owned()))
            .to_vec()
    }

    #[test]
    fn both_ways_of_publishing_keep_other_entries_and_remove_old_parts() {
        let root = tempfile::tempdir().unwrap();
        let (target, new) = prepared(root.path());
        assert!(File::open(new.path()).unwrap().try_lock().is_err(), "a living writer holds a lock");
        new.publish(&["mark"], &is_part).unwrap();
        assert_eq!(words(&target), expected());
        assert_eq!(fs::read_to_string(target.join("sub/notes")).unwrap(), "kept");

        let root = tempfile::tempdir().unwrap();
        let (target, new) = prepared(root.path());
        let written = ["mark", "values"].map(OsString::from).to_vec();
        new.rename_each(written, &["mark"], &is_part).unwrap();
        drop(new);
        assert_eq!(words(&target), expected());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }

    #[test]
    fn unpublished_folders_and_those_of_dead_writers_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let (target, new) = prepared(root.path());
        let before = words(&target);
        let before: Vec<_> = before.into_iter().filter(|(_, word)| word != "new").collect();
        // The state after its process was killed: the lock ends, the folder stays.
        let Folder { stage, _lock: lock, .. } = new;
        let left = stage.keep();
        drop(lock);
        let living = Folder::beside(&target).unwrap();
        assert!(!left.exists(), "a dead writer's folder");
        let other = Folder::beside(&target).unwrap();
        assert!(living.path().exists(), "a living writer's folder");
        drop((living, other));
        assert_eq!(words(&target), before);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_link_to_a_folder_stays_a_link() {
        let root = tempfile::tempdir().unwrap();
        let (target, _) = prepared(root.path());
        let link = root.path().join("link");
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let new = Folder::beside(&link).unwrap();
        fs::write(new.path().join("values"), "through the link").unwrap();
        new.publish(&[], &|_| false).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(target.join("values")).unwrap(), "through the link");
    }
}
