//! A folder of checkpoints.

use std::fs::{self, File};
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

/// A folder of checkpoints. One process at a time writes into it.
#[derive(Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
}

impl Checkpoints {
    /// Opens a folder, makes it where it is missing, and removes what a crash has left there half-written. The last `keep`
    /// checkpoints, 1 at least, will be kept.
    ///
    /// # Errors
    /// `keep` 0; a folder that cannot be made or read.
    pub fn open(folder: &Path, keep: usize) -> Result<Self> {
        if keep == 0 {
            return Err(Error::config("checkpoints", "0 to keep; expected 1 or more"));
        }
        let io = |cause| Error::Io { path: folder.to_owned(), cause };
        fs::create_dir_all(folder).map_err(io)?;
        for entry in fs::read_dir(folder).map_err(io)? {
            let entry = entry.map_err(io)?;
            if entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
                fs::remove_dir_all(entry.path()).map_err(|cause| Error::Io { path: entry.path(), cause })?;
            }
        }
        Ok(Self { folder: folder.to_owned(), keep })
    }

    /// Where it lies.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The steps of which there is a checkpoint, valid or not, the newest first.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let io = |cause| Error::Io { path: self.folder.clone(), cause };
        let mut steps = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(io)? {
            let name = entry.map_err(io)?.file_name();
            steps.extend(name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse::<u64>().ok()));
        }
        steps.sort_unstable_by(|a, b| b.cmp(a));
        Ok(steps)
    }

    /// Writes a checkpoint, in the place of one of the same step, and removes those that are no longer to be kept. Returns
    /// where it lies.
    ///
    /// # Errors
    /// [`Error::Save`] with the remedy, for example on a full disk: the earlier checkpoints are as they were, and what was
    /// written of this one is removed.
    pub fn save(&self, snapshot: &Snapshot<'_>) -> Result<PathBuf> {
        let name = format!("{PREFIX}{:012}", snapshot.step);
        let (target, temporary) = (self.folder.join(&name), self.folder.join(format!("{TEMPORARY}{name}")));
        let written = write(&temporary, snapshot).and_then(|()| {
            let earlier = target.exists().then(|| self.hide(&target)).transpose()?;
            fs::rename(&temporary, &target)?;
            sync_folder(&self.folder)?;
            earlier.map_or(Ok(()), fs::remove_dir_all)
        });
        if let Err(cause) = written {
            // What cannot be removed now is removed when the folder is opened again.
            let _ = fs::remove_dir_all(&temporary);
            let remedy = remedy(&cause);
            return Err(Error::Save { step: snapshot.step, path: temporary, cause, remedy });
        }
        for step in self.steps()?.into_iter().skip(self.keep) {
            let old = self.folder.join(format!("{PREFIX}{step:012}"));
            self.hide(&old).and_then(fs::remove_dir_all).map_err(|cause| Error::Io { path: old, cause })?;
        }
        Ok(target)
    }

    /// Reads the newest checkpoint that is whole. One that is not is passed over, and its reason is in
    /// [`Found::refused`].
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] with all reasons where there are checkpoints and none is whole.
    pub fn latest(&self) -> Result<Found> {
        let mut refused = Vec::new();
        for step in self.steps()? {
            match read(&self.folder.join(format!("{PREFIX}{step:012}")), step) {
                Ok(checkpoint) => return Ok(Found { checkpoint: Some(checkpoint), refused }),
                Err(error) => refused.push(error.to_string()),
            }
        }
        if refused.is_empty() {
            return Ok(Found { checkpoint: None, refused });
        }
        Err(Error::NoCheckpoint { folder: self.folder.clone(), refused })
    }

    /// Takes a checkpoint's name away before it is removed, so that there is never half of one under its name.
    fn hide(&self, path: &Path) -> io::Result<PathBuf> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let hidden = self.folder.join(format!("{TEMPORARY}old-{name}"));
        if hidden.exists() {
            fs::remove_dir_all(&hidden)?;
        }
        fs::rename(path, &hidden)?;
        Ok(hidden)
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
    let manifest = Manifest::verify(folder)?;
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
