//! Private Python environments in the user's cache folder, shared by all checkouts.
//!
//! An environment is complete when it has its stamp. The stamp is written last, so an interrupted environment is created
//! again. A file lock keeps two checkouts from building the same one. The lock file is also pip's standard
//! input, so a pip that outlives its parent still holds the lock, and nothing else writes the environment.

mod pip;

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::python::{self, Python};

const STAMP: &str = "complete";

/// The specification of an environment.
pub(crate) struct Recipe {
    /// Its folder's name.
    pub(crate) name: String,
    /// The installed packages, in words.
    pub(crate) what: String,
    /// The version of torch in it.
    pub(crate) torch: String,
    /// Disk space that it takes, in words.
    pub(crate) size: &'static str,
    /// Arguments of `pip install`.
    pub(crate) packages: Vec<String>,
    /// The content of the stamp: an environment with another stamp is updated.
    pub(crate) fingerprint: String,
}

/// A complete environment.
pub(crate) struct Venv {
    pub(crate) folder: PathBuf,
    /// How long its creation took, if it was created now.
    pub(crate) made_in: Option<Duration>,
}

impl Venv {
    pub(crate) fn python(&self) -> PathBuf {
        python_of(&self.folder)
    }

    /// The package folder of `torch`.
    pub(crate) fn torch(&self) -> Result<PathBuf> {
        let folder =
            site_packages(&self.folder).map(|site| site.join("torch")).filter(|torch| torch.is_dir());
        folder
            .with_context(|| format!("{} has no torch; remove it and run this again", self.folder.display()))
    }
}

/// Creates the environment of `recipe` in `cache` if it is missing.
///
/// `works` checks an environment without a stamp, so that a complete one that lost its stamp or was made by hand is kept.
pub(crate) fn ensure(cache: &Path, recipe: &Recipe, works: impl Fn(&Path) -> bool) -> Result<Venv> {
    let folder = cache.join(&recipe.name);
    if stamp_of(&folder).as_deref() == Some(&*recipe.fingerprint) && works(&folder) {
        return Ok(Venv { folder, made_in: None });
    }
    std::fs::create_dir_all(cache).with_context(|| {
        format!("cannot create {}; set FRUGAL_CACHE to a folder that you may write", cache.display())
    })?;
    let lock = lock(&cache.join(format!("{}.lock", recipe.name)), recipe)?;
    let start = Instant::now();
    let stamp = stamp_of(&folder);
    if works(&folder) && stamp.as_deref().is_none_or(|stamp| stamp == recipe.fingerprint) {
        write_stamp(&folder, recipe)?;
        return Ok(Venv { folder, made_in: None });
    }
    // The environment of an older recipe is updated; an interrupted one has no stamp and is not trusted.
    let older = stamp.is_some_and(|stamp| stamp != recipe.fingerprint);
    let upgrade = older && python::version_of(&python_of(&folder)).is_some();
    let python = if upgrade { None } else { Some(Python::find(&recipe.torch)?) };
    let log = cache.join(format!("{}.log", recipe.name));
    let _ = std::fs::remove_file(&log);
    if upgrade {
        let stamp = folder.join(STAMP);
        std::fs::remove_file(&stamp).with_context(|| format!("cannot remove {}", stamp.display()))?;
    } else if folder.exists() {
        eprintln!("setup: {} is incomplete or damaged; creating it again", folder.display());
        std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    let (what, size) = (&recipe.what, recipe.size);
    eprintln!(
        "setup: installing {what} with pip into {} ({size}), shared by all checkouts",
        folder.display()
    );
    if let Some(python) = python {
        let mut command = Command::new(&python.program);
        command.args(["-m", "venv"]).arg(&folder);
        pip::run(command, &lock, &log, recipe, "creating the environment")?;
    }
    let mut command = Command::new(python_of(&folder));
    command.args(["-m", "pip", "install", "--no-input", "--no-user", "--progress-bar", "off"]);
    command.arg("--disable-pip-version-check").args(&recipe.packages);
    pip::run(command, &lock, &log, recipe, "starting pip")?;
    if !works(&folder) {
        bail!("pip succeeded, but {} does not work; see {}", folder.display(), log.display());
    }
    write_stamp(&folder, recipe)?;
    Ok(Venv { folder, made_in: Some(start.elapsed()) })
}

/// `bin/python` of an environment.
pub(crate) fn python_of(folder: &Path) -> PathBuf {
    folder.join("bin/python")
}

/// `lib/python3.N/site-packages` of an environment.
pub(crate) fn site_packages(folder: &Path) -> Option<PathBuf> {
    let versions = std::fs::read_dir(folder.join("lib")).ok()?.flatten();
    versions.map(|version| version.path().join("site-packages")).find(|site| site.is_dir())
}

/// Returns whether every file that the wheels of `distributions` list exists with its full length.
pub(crate) fn wheels_complete(folder: &Path, distributions: &[&str]) -> bool {
    let Some(site) = site_packages(folder) else { return false };
    let entries: Vec<PathBuf> =
        std::fs::read_dir(&site).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    distributions.iter().all(|distribution| {
        let info = entries.iter().find(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.ends_with(".dist-info")
                && name.strip_prefix(distribution).is_some_and(|rest| rest.starts_with('-'))
        });
        let record = info.and_then(|info| std::fs::read_to_string(info.join("RECORD")).ok());
        record.is_some_and(|record| record.lines().all(|line| listed_file_is_there(&site, line)))
    })
}

/// Returns whether the file of a line of a wheel's `RECORD` is there: `path,sha256=…,length`. Compiled files have no length and do not matter.
fn listed_file_is_there(site: &Path, line: &str) -> bool {
    let mut fields = line.rsplitn(3, ',');
    let (length, _hash, path) = (fields.next(), fields.next(), fields.next());
    let (Some(Ok(length)), Some(path)) = (length.map(str::parse::<u64>), path) else { return true };
    std::fs::metadata(site.join(path.trim_matches('"'))).is_ok_and(|file| file.len() == length)
}

fn stamp_of(folder: &Path) -> Option<String> {
    std::fs::read_to_string(folder.join(STAMP)).ok()
}

fn write_stamp(folder: &Path, recipe: &Recipe) -> Result<()> {
    files::atomic_write::unsynced(&folder.join(STAMP), recipe.fingerprint.as_bytes())
        .with_context(|| format!("cannot write into {}", folder.display()))
}

fn lock(path: &Path, recipe: &Recipe) -> Result<File> {
    let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path);
    let file = file.with_context(|| {
        format!("cannot write {}; set FRUGAL_CACHE to a folder that you may write", path.display())
    })?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            eprintln!("setup: another process is installing {}; waiting for it to finish", recipe.what);
            file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
        }
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| {
                format!("cannot lock {}; set FRUGAL_CACHE to a folder on a local disk", path.display())
            });
        }
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn recipe() -> Recipe {
        Recipe {
            name: "sample".into(),
            what: "a sample".into(),
            torch: "2.11.0".into(),
            size: "1 GB",
            packages: vec!["torch==2.11.0".into()],
            fingerprint: "torch==2.11.0".into(),
        }
    }

    #[test]
    fn a_wheel_is_complete_when_every_listed_file_has_its_length() {
        let dir = tempfile::tempdir().unwrap();
        let site = dir.path().join("lib/python3.11/site-packages");
        let info = site.join("torch-2.11.0.dist-info");
        std::fs::create_dir_all(&info).unwrap();
        std::fs::create_dir_all(site.join("torch")).unwrap();
        std::fs::write(site.join("torch/a.so"), "four").unwrap();
        assert!(!wheels_complete(dir.path(), &["torch"]), "no RECORD yet");
        let record = "torch/a.so,sha256=abc,4\ntorch/a.pyc,,\ntorch-2.11.0.dist-info/RECORD,,\n";
        std::fs::write(info.join("RECORD"), record).unwrap();
        assert!(wheels_complete(dir.path(), &["torch"]));
        assert!(!wheels_complete(dir.path(), &["torch", "nvidia_cuda_runtime"]), "a wheel is missing");
        std::fs::write(site.join("torch/a.so"), "cut").unwrap();
        assert!(!wheels_complete(dir.path(), &["torch"]), "a file is cut short");
    }

    #[test]
    fn a_finished_environment_is_taken_as_it_is_and_gets_its_stamp() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("sample");
        std::fs::create_dir(&folder).unwrap();
        assert!(ensure(dir.path(), &recipe(), |_| true).unwrap().made_in.is_none());
        assert_eq!(stamp_of(&folder).as_deref(), Some("torch==2.11.0"));
    }
}
