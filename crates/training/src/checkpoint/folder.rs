//! A folder of checkpoints.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use models::tensors_file;
use runtime::random::RandomState;
use serde_json::Value;
use tch::{Device, Tensor};

use super::manifest::Manifest;
use crate::error::{Error, Result};

const PREFIX: &str = "step-";
/// What begins so is not whole, or no longer wanted.
const TEMPORARY: &str = ".tmp-";
/// A whole checkpoint whose place another of the same step is about to take.
const REPLACED: &str = ".replaced-";
/// A checkpoint of a training that did not go on from there.
const ABANDONED: &str = "abandoned-";
const LOCK: &str = ".lock";
const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const RANDOM: &str = "random.bin";
const STATE: &str = "state.json";

/// What goes into a checkpoint.
#[derive(Debug)]
pub struct Snapshot<'a> {
    /// Steps done.
    pub step: u64,
    /// The model's state.
    pub model: &'a [(String, Tensor)],
    /// The optimizer's state.
    pub optimizer: &'a [(String, Tensor)],
    /// The random generators.
    pub random: &'a RandomState,
    /// What else the training needs to go on.
    pub state: &'a Value,
}

/// What came out of one.
#[derive(Debug)]
pub struct Checkpoint {
    /// Where it lies.
    pub path: PathBuf,
    /// Steps done.
    pub step: u64,
    /// The model's state, on the CPU.
    pub model: Vec<(String, Tensor)>,
    /// The optimizer's state, on the CPU.
    pub optimizer: Vec<(String, Tensor)>,
    /// The random generators.
    pub random: RandomState,
    /// What else the training needs to go on.
    pub state: Value,
}

/// What [`Checkpoints::latest`] found.
#[derive(Debug)]
pub struct Found {
    /// The newest valid checkpoint; `None` in a folder without any.
    pub checkpoint: Option<Checkpoint>,
    /// Why newer ones were refused, each with the file's name.
    pub refused: Vec<String>,
}

/// A checkpoint that was written.
#[derive(Debug)]
pub struct Saved {
    /// Where it lies.
    pub path: PathBuf,
    /// What went wrong, or was set aside, after it was on the disk.
    pub warnings: Vec<String>,
}

/// A folder of checkpoints that this process, and no other, writes into: the lock of its file `.lock` is held until the
/// value is dropped or the process ends, however it ends. Reading takes no lock: [`latest`] and [`steps`].
#[derive(Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
    _lock: File,
}

impl Checkpoints {
    /// Opens a folder, makes it where it is missing, removes what a crash has left there half-written, and puts back what a
    /// crash kept from being replaced. The last `keep` checkpoints, 1 at least, will be kept.
    ///
    /// # Errors
    /// `keep` 0; a folder that cannot be made or read; [`Error::Locked`] where another process writes into it.
    pub fn open(folder: &Path, keep: usize) -> Result<Self> {
        if keep == 0 {
            return Err(Error::config("checkpoints", "0 to keep; expected 1 or more"));
        }
        let io = |cause| Error::Io { path: folder.to_owned(), cause };
        make_folder(folder).map_err(io)?;
        let lock = lock(folder)?;
        for entry in fs::read_dir(folder).map_err(io)? {
            let (path, name) = entry.map(|entry| (entry.path(), entry.file_name())).map_err(io)?;
            let name = name.to_string_lossy();
            let own = name.strip_prefix(REPLACED).map(|name| folder.join(name));
            match own {
                // The crash came before the new one had the name.
                Some(own) if !own.exists() => fs::rename(&path, own),
                Some(_) => fs::remove_dir_all(&path),
                None if name.starts_with(TEMPORARY) => fs::remove_dir_all(&path),
                None => Ok(()),
            }
            .map_err(|cause| Error::Io { path, cause })?;
        }
        Ok(Self { folder: folder.to_owned(), keep, _lock: lock })
    }

    /// [`steps`] of this folder.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        steps(&self.folder)
    }

    /// [`latest`] of this folder.
    ///
    /// # Errors
    /// As [`latest`].
    pub fn latest(&self) -> Result<Found> {
        latest(&self.folder)
    }

    /// Writes a checkpoint, in the place of one of the same step. Then sets those of later steps aside ([`Self::go_on_from`]:
    /// they are not of this training), and removes all but the last that are to be kept.
    ///
    /// # Errors
    /// [`Error::Save`] with the remedy, for example on a full disk: the earlier checkpoints are as they were, and what was
    /// written of this one is removed. What goes wrong when it is on the disk is in [`Saved::warnings`].
    pub fn save(&self, snapshot: &Snapshot<'_>) -> Result<Saved> {
        let mut saved = self.add(snapshot)?;
        match steps_and_paths(&self.folder) {
            Err(error) => saved.warnings.push(format!("earlier checkpoints were not removed: {error}")),
            Ok(all) => {
                let own = all.into_iter().filter(|(step, _)| *step <= snapshot.step);
                for (_, old) in own.skip(self.keep) {
                    if let Err(cause) = self.hide(&old, TEMPORARY).and_then(fs::remove_dir_all) {
                        let old = old.display();
                        saved.warnings.push(format!("the earlier checkpoint {old} was not removed: {cause}"));
                    }
                }
            }
        }
        Ok(saved)
    }

    /// [`Checkpoints::save`] that removes no earlier checkpoint.
    ///
    /// # Errors
    /// As [`Checkpoints::save`].
    pub fn add(&self, snapshot: &Snapshot<'_>) -> Result<Saved> {
        let name = format!("{PREFIX}{:012}", snapshot.step);
        let (path, temporary) = (self.folder.join(&name), self.folder.join(format!("{TEMPORARY}{name}")));
        let (mut replaced, mut warnings) = (None, Vec::new());
        let written = write(&temporary, snapshot).and_then(|()| {
            replaced = path.exists().then(|| self.hide(&path, REPLACED)).transpose()?;
            fs::rename(&temporary, &path)?;
            sync_folder(&self.folder)
        });
        if let Err(cause) = written {
            // What cannot be removed or put back now is when the folder is opened again.
            let _ = fs::remove_dir_all(&temporary);
            if let Some(replaced) = replaced.filter(|_| !path.exists()) {
                let _ = fs::rename(replaced, &path);
            }
            let remedy = remedy(&cause);
            return Err(Error::Save { step: snapshot.step, path: temporary, cause, remedy });
        }
        if let Some(Err(cause)) = replaced.map(fs::remove_dir_all) {
            let path = path.display();
            warnings.push(format!("the checkpoint that {path} replaces was not removed: {cause}"));
        }
        match self.go_on_from(snapshot.step) {
            Ok(aside) => warnings.extend(aside),
            Err(error) => warnings.push(format!("checkpoints of later steps were not set aside: {error}")),
        }
        Ok(Saved { path, warnings })
    }

    /// Sets every checkpoint after `step` aside, under the name `abandoned-step-…`: the training goes on from `step`, and
    /// comes to those steps by another way. Otherwise a later resume would take them for its own newest. Returns a line about
    /// each.
    ///
    /// # Errors
    /// A folder that cannot be read, a checkpoint that cannot be renamed.
    pub fn go_on_from(&self, step: u64) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        for (later, path) in steps_and_paths(&self.folder)?.into_iter().filter(|(later, _)| *later > step) {
            let name = format!("{ABANDONED}{PREFIX}{later:012}");
            let names = std::iter::once(name.clone()).chain((2..).map(|number| format!("{name}-{number}")));
            let mut free = names.map(|name| self.folder.join(name)).filter(|path| !path.exists());
            let Some(aside) = free.next() else { continue };
            fs::rename(&path, &aside).map_err(|cause| Error::Io { path: path.clone(), cause })?;
            let (path, aside) = (path.display(), aside.display());
            lines.push(format!(
                "{path} is not of this training, which goes on from step {step}; it lies in {aside}, and may be removed"
            ));
        }
        Ok(lines)
    }

    /// Takes a checkpoint's name away before it is removed, so that there is never half of one under its name.
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

/// The steps of which there is a checkpoint in `folder`, valid or not, the newest first. Writes nothing.
///
/// # Errors
/// A folder that cannot be read.
pub fn steps(folder: &Path) -> Result<Vec<u64>> {
    Ok(steps_and_paths(folder)?.into_iter().map(|(step, _)| step).collect())
}

/// Reads the newest checkpoint in `folder` that is whole. One that is not is passed over, and its reason is in
/// [`Found::refused`]. Writes nothing.
///
/// # Errors
/// [`Error::NoCheckpoint`] with all reasons where there are checkpoints and none is whole.
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

/// Every checkpoint with its step, the newest first. One whose replacement a crash has stopped counts as its step's.
fn steps_and_paths(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let io = |cause| Error::Io { path: folder.to_owned(), cause };
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let entry = entry.map_err(io)?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let own = name.strip_prefix(REPLACED).unwrap_or(name);
        let Some(step) = own.strip_prefix(PREFIX).and_then(|step| step.parse::<u64>().ok()) else { continue };
        if own == name || !folder.join(own).exists() {
            all.insert(step, entry.path());
        }
    }
    Ok(all.into_iter().rev().collect())
}

/// Makes a folder, and syncs each folder that holds a new name.
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
    let file = file.map_err(|cause| Error::Io { path: path.clone(), cause })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::Locked { folder: folder.to_owned() }),
        // A file system without locks: then one process at a time is the user's care.
        Err(TryLockError::Error(cause)) if cause.kind() == io::ErrorKind::Unsupported => Ok(file),
        Err(TryLockError::Error(cause)) => Err(Error::Io { path, cause }),
    }
}

fn write(folder: &Path, snapshot: &Snapshot<'_>) -> io::Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir(folder)?;
    let mut manifest = Manifest::new(snapshot.step);
    manifest.write(folder, MODEL, |out| tensors_file::write_to(out, snapshot.model))?;
    manifest.write(folder, OPTIMIZER, |out| tensors_file::write_to(out, snapshot.optimizer))?;
    manifest.write(folder, RANDOM, |out| out.write_all(&snapshot.random.to_bytes()))?;
    manifest.write(folder, STATE, |out| Ok(serde_json::to_writer_pretty(out, snapshot.state)?))?;
    manifest.finish(folder)?;
    sync_folder(folder)
}

fn read(folder: &Path, step: u64) -> Result<Checkpoint> {
    let manifest = Manifest::verify(folder, &[MODEL, OPTIMIZER, RANDOM, STATE])?;
    if manifest.step != step {
        return Err(Error::file(folder, format!("its manifest is that of step {}", manifest.step)));
    }
    let bytes = |name: &str| {
        let path = folder.join(name);
        fs::read(&path).map_err(|cause| Error::Io { path, cause })
    };
    let state = serde_json::from_slice(&bytes(STATE)?)
        .map_err(|cause| Error::file(&folder.join(STATE), format!("not JSON: {cause}")))?;
    Ok(Checkpoint {
        path: folder.to_owned(),
        step,
        model: tensors_file::read(&folder.join(MODEL), Device::Cpu)?,
        optimizer: tensors_file::read(&folder.join(OPTIMIZER), Device::Cpu)?,
        random: RandomState::from_bytes(&bytes(RANDOM)?)?,
        state,
    })
}

/// A rename is on disk when the folder that holds the name is.
fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

fn remedy(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free space on its file system, keep fewer checkpoints, or choose a folder on another disk"
        }
        io::ErrorKind::FileTooLarge => "raise the limit on the size of files (`ulimit -f`)",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "choose a folder that may be written"
        }
        _ => "check the folder and its disk",
    }
}
