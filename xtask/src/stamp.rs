//! The stamp of an experiment's last run, by which `--resume` skips it and its duration is predicted.

use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use report::{RunOutcome, RunState};
use serde::{Deserialize, Serialize};

/// The settings that determine the records of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Setting {
    /// `smoke`, `laptop`, `full` or `paper`; empty for what has one size: a comparison, and some experiments.
    pub(crate) scale: String,
    pub(crate) device: String,
    pub(crate) seed: u64,
    /// Git revision.
    pub(crate) revision: String,
    /// Digest of the executable: a changed checkout keeps its revision.
    pub(crate) program: String,
}

/// The last run of one experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Stamp {
    #[serde(flatten)]
    pub(crate) setting: Setting,
    /// Duration of the last complete run at this scale on this device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) usual_seconds: Option<f64>,
    #[serde(flatten)]
    pub(crate) outcome: RunOutcome,
}

impl Stamp {
    /// The stamp of `experiment` in the folder `run`. `None` if it cannot be read.
    pub(crate) fn read(run: &Path, experiment: &str) -> Option<Self> {
        serde_json::from_str(&std::fs::read_to_string(path(run, experiment)).ok()?).ok()
    }

    /// Every stamp in the folder.
    pub(crate) fn read_all(run: &Path) -> Vec<Self> {
        let files = std::fs::read_dir(run).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut stamps: Vec<Self> = files
            .filter(|file| file.extension().is_some_and(|extension| extension == "stamp"))
            .filter_map(|file| serde_json::from_str(&std::fs::read_to_string(file).ok()?).ok())
            .collect();
        stamps.sort_by(|a, b| a.outcome.experiment.cmp(&b.outcome.experiment));
        stamps
    }

    pub(crate) fn write(&self, run: &Path) -> Result<()> {
        let text = serde_json::to_string(self).context("a stamp is plain data")?;
        replace(&path(run, &self.outcome.experiment), text.as_bytes())
    }

    /// Whether a run with this setting has been completed.
    pub(crate) fn covers(&self, setting: &Setting) -> bool {
        matches!(self.outcome.state, RunState::Done { .. }) && self.setting == *setting
    }

    /// Seconds that a run of this scale on this device takes here.
    pub(crate) fn estimate(&self, setting: &Setting) -> Option<f64> {
        let same = self.setting.scale == setting.scale && self.setting.device == setting.device;
        self.usual_seconds.filter(|_| same)
    }
}

fn path(run: &Path, experiment: &str) -> PathBuf {
    run.join(format!("{experiment}.stamp"))
}

/// Writes a file through a rename, so that a reader never sees half of it.
pub(crate) fn replace(path: &Path, content: &[u8]) -> Result<()> {
    files::atomic_write::unsynced(path, content).with_context(|| format!("cannot write {}", path.display()))
}

/// A digest of a file that changes when the file does.
pub(crate) fn digest(path: &Path) -> Result<String> {
    let mut file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut hasher = DefaultHasher::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer).with_context(|| format!("cannot read {}", path.display()))? {
            0 => return Ok(format!("{:016x}", hasher.finish())),
            n => hasher.write(&buffer[..n]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp() -> Stamp {
        Stamp {
            setting: Setting {
                scale: "laptop".into(),
                device: "cpu".into(),
                seed: 0,
                revision: "abc".into(),
                program: "1".into(),
            },
            usual_seconds: Some(5.0),
            outcome: RunOutcome { experiment: "lora".into(), state: RunState::Done { seconds: 5.0 } },
        }
    }

    #[test]
    fn a_stamp_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        stamp().write(dir.path()).unwrap();
        assert_eq!(Stamp::read(dir.path(), "lora"), Some(stamp()));
        assert_eq!(Stamp::read_all(dir.path()), [stamp()]);
        std::fs::write(dir.path().join("lora.stamp"), "{").unwrap();
        assert_eq!(Stamp::read(dir.path(), "lora"), None);
    }

    #[test]
    fn only_a_complete_run_with_the_same_setting_counts() {
        let same = stamp().setting;
        assert!(stamp().covers(&same));
        for other in [
            Setting { scale: "smoke".into(), ..same.clone() },
            Setting { device: "cuda".into(), ..same.clone() },
            Setting { seed: 1, ..same.clone() },
            Setting { revision: "def".into(), ..same.clone() },
            Setting { program: "2".into(), ..same.clone() },
        ] {
            assert!(!stamp().covers(&other), "{other:?}");
        }
        let failed = RunState::Failed { message: "x".into() };
        let failed = Stamp { outcome: RunOutcome { experiment: "lora".into(), state: failed }, ..stamp() };
        assert!(!failed.covers(&same));
        assert_eq!(failed.estimate(&same), Some(5.0));
        assert_eq!(failed.estimate(&Setting { scale: "smoke".into(), ..same }), None);
    }
}
