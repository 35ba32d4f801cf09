//! A folder of checkpoints.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use models::tensors_file;
use runtime::random::RandomState;
use serde_json::Value;
use tch::Tensor;

use super::manifest::Manifest;
use super::snapshot::Snapshot;
use crate::error::{Error, Result};

const PREFIX: &str = "step-";
/// The prefix of incomplete or obsolete checkpoints.
const TEMPORARY: &str = ".tmp-";
/// The prefix of a complete checkpoint that another of the same step is about to replace.
const REPLACED: &str = ".replaced-";
/// The prefix of a checkpoint of a run that was resumed from an earlier step.
const ABANDONED: &str = "abandoned-";
const LOCK: &str = ".lock";
const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const RANDOM: &str = "random.bin";
const STATE: &str = "state.json";

/// A checkpoint that was read.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its path.
    pub path: PathBuf,
    /// Returns the number of completed steps.
    pub step: u64,
    /// The model's state, over the file's pages.
    pub model: Vec<(String, Tensor)>,
    /// The optimizer's state, over the file's pages.
    pub optimizer: Vec<(String, Tensor)>,
    /// The random generators.
    pub random: RandomState,
    /// Further state of the training.
    pub state: Value,
}

impl Checkpoint {
    /// Returns the SHA-256 of its manifest, which has those of its files.
    ///
    /// # Errors
    /// A file that is no longer there.
    pub fn digest(&self) -> Result<String> {
        Manifest::digest(&self.path)
    }
}

/// The result of [`Checkpoints::latest`].
#[derive(Debug)]
pub struct Found {
    /// The newest valid checkpoint; `None` in a folder without any.
    pub checkpoint: Option<Checkpoint>,
    /// Why newer checkpoints were refused, each with the file's name.
    pub refused: Vec<String>,
}

/// A checkpoint that was written.
#[derive(Debug)]
pub struct Saved {
    /// Its path.
    pub path: PathBuf,
    /// Problems after it was written, such as earlier checkpoints that could not be removed.
    pub warnings: Vec<String>,
}

/// A folder of checkpoints that only this process writes to: it holds the lock of the file `.lock` until the value is dropped
/// or the process ends. Reading takes no lock: [`latest`] and [`steps`].
#[derive(Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
    /// `None` for a reader.
    lock: Option<File>,
}

impl Checkpoints {
    /// Opens a folder, creating it if needed; removes incomplete checkpoints, and restores one whose replacement was
    /// interrupted. Keeps the last `keep` checkpoints, at least 1.
    ///
    /// # Errors
    /// `keep` 0; a folder that cannot be created or read; [`Error::Locked`] if another process writes to it.
    pub fn open(folder: &Path, keep: usize) -> Result<Self> {
        if keep == 0 {
            return Err(Error::config("checkpoints", "`keep` is 0; expected at least 1"));
        }
        let io = |cause| Error::io(folder, cause);
        make_folder(folder).map_err(io)?;
        let lock = lock(folder)?;
        for entry in fs::read_dir(folder).map_err(io)? {
            let (path, name) = entry.map(|entry| (entry.path(), entry.file_name())).map_err(io)?;
            let name = name.to_string_lossy();
            let original = name.strip_prefix(REPLACED).map(|name| folder.join(name));
            match original {
                // The crash was before the new one got its name.
                Some(original) if !original.exists() && path.is_dir() => fs::rename(&path, original),
                Some(_) => remove(&path),
                None if name.starts_with(TEMPORARY) => remove(&path),
                None => Ok(()),
            }
            .map_err(|cause| Error::io(path, cause))?;
        }
        Ok(Self { folder: folder.to_owned(), keep, lock: Some(lock) })
    }

    /// Returns the folder that another rank of the same training writes: takes no lock, and [`Checkpoints::save`] is refused.
    pub fn reader(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), keep: 1, lock: None }
    }

    /// Returns whether this is a [`Checkpoints::reader`].
    pub fn is_reader(&self) -> bool {
        self.lock.is_none()
    }

    /// [`steps`] of this folder.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        steps(&self.folder)
    }

    /// [`latest`] of this folder; of a [`Checkpoints::reader`] none where there is no folder, as on a machine that does not share it.
    ///
    /// # Errors
    /// As [`latest`].
    pub fn latest(&self) -> Result<Found> {
        if self.is_reader() && !self.folder.exists() {
            return Ok(Found { checkpoint: None, refused: Vec::new() });
        }
        latest(&self.folder)
    }

    /// Writes a checkpoint, replacing one of the same step. Then abandons those of later steps ([`Self::abandon_after`]: they
    /// belong to another run) and removes all but the last ones to keep.
    ///
    /// # Errors
    /// [`Error::Save`] with the remedy, for example on a full disk: earlier checkpoints stay as they were, and the incomplete
    /// one is removed. What other ranks have of the tensors is received nevertheless. Those of the values. Problems after the write
    /// are in [`Saved::warnings`].
    pub fn save(&self, snapshot: Snapshot<'_>) -> Result<Saved> {
        let newest = snapshot.step;
        let mut saved = self.add(snapshot)?;
        match steps_and_paths(&self.folder) {
            Err(error) => saved.warnings.push(format!("earlier checkpoints were not removed: {error}")),
            Ok(all) => {
                let earlier = all.into_iter().filter(|(step, _)| *step <= newest);
                for (_, old) in earlier.skip(self.keep) {
                    if let Err(cause) = self.hide(&old, TEMPORARY).and_then(|hidden| remove(&hidden)) {
                        let old = old.display();
                        saved.warnings.push(format!("the earlier checkpoint {old} was not removed: {cause}"));
                    }
                }
            }
        }
        Ok(saved)
    }

    /// [`Checkpoints::save`], without removing earlier checkpoints.
    ///
    /// # Errors
    /// As [`Checkpoints::save`].
    pub fn add(&self, mut snapshot: Snapshot<'_>) -> Result<Saved> {
        if self.is_reader() {
            let reason = "the folder was opened to read; rank 0 writes the checkpoints";
            return Err(Error::config("checkpoints", reason));
        }
        let name = format!("{PREFIX}{:012}", snapshot.step);
        let (path, temporary) = (self.folder.join(&name), self.folder.join(format!("{TEMPORARY}{name}")));
        let (mut replaced, mut warnings) = (None, Vec::new());
        let written = write(&temporary, &mut snapshot).and_then(|()| {
            remove(&self.folder.join(format!("{REPLACED}{name}")))?;
            replaced = path.exists().then(|| self.hide(&path, REPLACED)).transpose()?;
            fs::rename(&temporary, &path)?;
            sync_folder(&self.folder)
        });
        if let Err(cause) = written {
            // What cannot be removed or restored now is when the folder is opened again.
            let _ = remove(&temporary);
            if let Some(replaced) = replaced.filter(|_| !path.exists()) {
                let _ = fs::rename(replaced, &path);
            }
            let given = snapshot.give();
            return Err(match cause.downcast::<runtime::Error>() {
                Ok(error) => error.into(),
                // A rank that failed meanwhile ends the training, which may go on without the checkpoint.
                Err(cause) => given.err().unwrap_or_else(|| {
                    let has_earlier = steps_and_paths(&self.folder).is_ok_and(|all| !all.is_empty());
                    save_error(snapshot.step, temporary, cause, has_earlier)
                }),
            });
        }
        if let Some(Err(cause)) = replaced.map(|replaced| remove(&replaced)) {
            let path = path.display();
            warnings.push(format!("the checkpoint that {path} replaces was not removed: {cause}"));
        }
        match self.abandon_after(snapshot.step) {
            Ok(aside) => warnings.extend(aside),
            Err(error) => warnings.push(format!("checkpoints of later steps were not renamed: {error}")),
        }
        Ok(Saved { path, warnings })
    }

    /// Renames every checkpoint after `step` to `abandoned-step-…`, because the training resumes from `step`. Otherwise a later
    /// resume would take them for its own newest. Returns a message about each.
    ///
    /// # Errors
    /// A folder that cannot be read, a checkpoint that cannot be renamed.
    pub fn abandon_after(&self, step: u64) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        for (later, path) in steps_and_paths(&self.folder)?.into_iter().filter(|(later, _)| *later > step) {
            let name = format!("{ABANDONED}{PREFIX}{later:012}");
            let names = std::iter::once(name.clone()).chain((2..).map(|number| format!("{name}-{number}")));
            let mut free = names.map(|name| self.folder.join(name)).filter(|path| !path.exists());
            let Some(aside) = free.next() else { continue };
            fs::rename(&path, &aside).map_err(|cause| Error::io(&path, cause))?;
            let (path, aside) = (path.display(), aside.display());
            lines.push(format!(
                "{path} does not belong to this training, which resumes from step {step}; it is now {aside}, and may be removed"
            ));
        }
        Ok(lines)
    }

    /// Renames a checkpoint before it is removed, so that an incomplete one never has its name.
    fn hide(&self, path: &Path, prefix: &str) -> io::Result<PathBuf> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let hidden = self.folder.join(format!("{prefix}{name}"));
        if hidden.exists() {
            fs::remove_dir_all(&hidden)?;
        }
        fs::rename(path, &hidden)?;
        Ok(hidden)
    }
}

/// Returns whether a process holds the lock of a folder of checkpoints. False where there is no folder, and on file systems without locks.
pub fn is_in_use(folder: &Path) -> bool {
    // Released at once, when the file is closed.
    let lock = File::open(folder.join(LOCK)).map(|file| file.try_lock_shared());
    matches!(lock, Ok(Err(TryLockError::WouldBlock)))
}

/// Lists the steps with a checkpoint in `folder`, valid or not, newest first. Writes nothing.
///
/// # Errors
/// A folder that cannot be read.
pub fn steps(folder: &Path) -> Result<Vec<u64>> {
    Ok(steps_and_paths(folder)?.into_iter().map(|(step, _)| step).collect())
}

/// Reads the newest complete checkpoint in `folder`. The reasons for refusing newer ones are in [`Found::refused`]. Writes
/// nothing.
///
/// # Errors
/// [`Error::NoCheckpoint`] with all reasons if no checkpoint is complete.
pub fn latest(folder: &Path) -> Result<Found> {
    let mut refused = Vec::new();
    for (step, path) in steps_and_paths(folder)? {
        match read(&path, step) {
            Ok(checkpoint) => return Ok(Found { checkpoint: Some(checkpoint), refused }),
            Err(error) => refused.push(error.to_string()),
        }
    }
    if refused.is_empty() {
        return Ok(Found { checkpoint: None, refused });
    }
    Err(Error::NoCheckpoint { folder: folder.to_owned(), refused })
}

/// Returns the step and the state of the newest checkpoint in `folder` whose state can be read, without its tensors. Writes nothing.
///
/// # Errors
/// A folder that cannot be read.
pub fn newest_state(folder: &Path) -> Result<Option<(u64, Value)>> {
    let read = |(step, path): (u64, PathBuf)| {
        let bytes = fs::read(path.join(STATE)).ok()?;
        Some((step, serde_json::from_slice(&bytes).ok()?))
    };
    Ok(steps_and_paths(folder)?.into_iter().find_map(read))
}

/// Lists every checkpoint with its step, newest first. One whose replacement was interrupted counts.
fn steps_and_paths(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let io = |cause| Error::io(folder, cause);
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let entry = entry.map_err(io)?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let original = name.strip_prefix(REPLACED).unwrap_or(name);
        let Some(step) = original.strip_prefix(PREFIX).and_then(|step| step.parse::<u64>().ok()) else {
            continue;
        };
        if original == name || !folder.join(original).exists() {
            all.insert(step, entry.path());
        }
    }
    Ok(all.into_iter().rev().collect())
}

/// Removes a folder with its contents; a file or a link with such a name too. Nothing there is no error.
fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(cause) => Err(cause),
    };
    match removed {
        Err(cause) if cause.kind() != io::ErrorKind::NotFound => Err(cause),
        _ => Ok(()),
    }
}

/// Creates a folder, and syncs each parent with a new entry.
fn make_folder(folder: &Path) -> io::Result<()> {
    let missing = folder.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
    let missing: Vec<&Path> = missing.collect();
    fs::create_dir_all(folder)?;
    for made in missing.into_iter().rev() {
        let holder = made.parent().filter(|holder| !holder.as_os_str().is_empty());
        sync_folder(holder.unwrap_or(Path::new(".")))?;
    }
    Ok(())
}

fn lock(folder: &Path) -> Result<File> {
    let path = folder.join(LOCK);
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(|cause| Error::io(&path, cause))?;
    let mut locked = file.try_lock();
    // A writer excludes the shared lock too. Without a writer it is [`is_in_use`] in another process that holds one, for a moment.
    while matches!(locked, Err(TryLockError::WouldBlock)) && file.try_lock_shared().is_ok() {
        file.unlock().map_err(|cause| Error::io(&path, cause))?;
        std::thread::yield_now();
        locked = file.try_lock();
    }
    match locked {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::Locked { folder: folder.to_owned() }),
        // On a file system without locks the user must make sure that one process writes.
        Err(TryLockError::Error(cause)) if cause.kind() == io::ErrorKind::Unsupported => Ok(file),
        Err(TryLockError::Error(cause)) => Err(Error::io(path, cause)),
    }
}

fn write(folder: &Path, snapshot: &mut Snapshot<'_>) -> io::Result<()> {
    remove(folder)?;
    fs::create_dir(folder)?;
    let mut manifest = Manifest::new(snapshot.step);
    manifest.write(folder, MODEL, |out| snapshot.model.write_to(out))?;
    manifest.write(folder, OPTIMIZER, |out| snapshot.optimizer.write_to(out))?;
    manifest.write(folder, RANDOM, |out| out.write_all(&snapshot.random.to_bytes()))?;
    manifest.write(folder, STATE, |out| Ok(serde_json::to_writer_pretty(out, &snapshot.state)?))?;
    manifest.finish(folder)?;
    sync_folder(folder)
}

fn read(folder: &Path, step: u64) -> Result<Checkpoint> {
    let manifest = Manifest::verify(folder, &[MODEL, OPTIMIZER, RANDOM, STATE])?;
    if manifest.step != step {
        return Err(Error::file(folder, format!("its manifest is of step {}", manifest.step)));
    }
    let bytes = |name: &str| {
        let path = folder.join(name);
        fs::read(&path).map_err(|cause| Error::io(path, cause))
    };
    let state = serde_json::from_slice(&bytes(STATE)?)
        .map_err(|cause| Error::file(folder.join(STATE), format!("not JSON: {cause}")))?;
    Ok(Checkpoint {
        path: folder.to_owned(),
        step,
        model: tensors_file::map(&folder.join(MODEL))?,
        optimizer: tensors_file::map(&folder.join(OPTIMIZER))?,
        random: RandomState::from_bytes(&bytes(RANDOM)?)?,
        state,
    })
}

/// A rename is durable when the parent folder is synced.
fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// The error of a checkpoint that was not written, with the remedy.
pub(crate) fn save_error(step: u64, path: PathBuf, cause: io::Error, has_earlier: bool) -> Error {
    let remedy = remedy(&cause);
    Error::Save { step, path, cause, remedy, has_earlier }
}

fn remedy(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free space on its file system, keep fewer checkpoints, or choose a folder on another disk"
        }
        io::ErrorKind::FileTooLarge => "raise the limit on the size of files (`ulimit -f`)",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "choose a writable folder",
        _ => "check the folder and its disk",
    }
}
