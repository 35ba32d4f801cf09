//! The files that may be at `--out` before something is written there.

use std::path::Path;

use anyhow::bail;
use frugal::Config;
use frugal::config::CONFIG_FILE;
use frugal::run_folder::{CHECKPOINTS, RunRecord};

/// The files that may be at `--out`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Existing {
    /// Nothing.
    Nothing,
    /// Anything: it is replaced.
    Replaced,
    /// An earlier training.
    Training,
}

impl Existing {
    /// By `--overwrite`.
    pub(crate) fn by_flag(overwrite: bool) -> Self {
        if overwrite { Self::Replaced } else { Self::Nothing }
    }
}

/// Refuses an output that exists, be it a file or a folder with something in it, unless it may be there. Reads no large file, so that it
/// can be called before any work.
///
/// # Errors
/// Something that may not be there, by name.
pub(crate) fn check(out: &Path, existing: Existing) -> anyhow::Result<()> {
    let names = match out.read_dir() {
        Ok(entries) => {
            let mut names: Vec<String> =
                entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
            names.sort();
            names
        }
        Err(_) if out.exists() => vec![String::new()],
        Err(_) => return Ok(()),
    };
    let shown = out.display();
    match existing {
        _ if names.is_empty() => Ok(()),
        Existing::Replaced => Ok(()),
        Existing::Nothing => {
            bail!("--out {shown} exists; give another, or --overwrite to replace what is there")
        }
        Existing::Training if !out.is_dir() => bail!("--out {shown} is a file; give a folder"),
        Existing::Training if is_of_training(out) => Ok(()),
        Existing::Training => {
            let more = names.len().saturating_sub(SHOWN);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            bail!(
                "--out {shown} holds {}{more}, which no training of this program wrote; give an empty or a new folder",
                names[..names.len().min(SHOWN)].join(", ")
            )
        }
    }
}

/// Names of files in an error.
const SHOWN: usize = 3;

/// Whether a training has written to this folder.
fn is_of_training(folder: &Path) -> bool {
    let config = folder.join(CONFIG_FILE);
    if config.is_file() {
        return Config::read(&config).is_ok();
    }
    folder.join(CHECKPOINTS).is_dir() || RunRecord::read(folder).is_ok_and(|record| record.is_some())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn outcome(out: &Path, existing: Existing) -> String {
        check(out, existing).map_or_else(|error| error.to_string(), |()| "goes".to_owned())
    }

    #[test]
    fn outputs_that_exist_are_refused_by_name() {
        let place = tempfile::tempdir().unwrap();
        let out = place.path().join("out");
        let shown = out.display();
        for existing in [Existing::Nothing, Existing::Training] {
            assert_eq!(outcome(&out, existing), "goes", "nothing is there");
        }
        fs::create_dir(&out).unwrap();
        assert_eq!(outcome(&out, Existing::Nothing), "goes", "an empty folder");
        for name in ["README.md", "config.json", "model.safetensors", "tokenizer.json"] {
            fs::write(out.join(name), "{}").unwrap();
        }
        let exists = format!("--out {shown} exists; give another, or --overwrite to replace what is there");
        assert_eq!(outcome(&out, Existing::by_flag(false)), exists);
        assert_eq!(outcome(&out, Existing::by_flag(true)), "goes");
        let foreign = format!(
            "--out {shown} holds README.md, config.json, model.safetensors and 1 more, which no training of this program wrote; \
             give an empty or a new folder"
        );
        assert_eq!(outcome(&out, Existing::Training), foreign);
        let file = out.join("README.md");
        assert_eq!(
            outcome(&file, Existing::Training),
            format!("--out {} is a file; give a folder", file.display())
        );
        assert!(outcome(&file, Existing::Nothing).contains("README.md exists"));
    }

    #[test]
    fn a_trainings_own_folder_goes() {
        let out = tempfile::tempdir().unwrap();
        let out = out.path();
        fs::write(out.join(CONFIG_FILE), "[package]\nname = \"another\"\n").unwrap();
        assert!(outcome(out, Existing::Training).contains("holds config.toml, which no training"));
        fs::write(out.join(CONFIG_FILE), "[training]\nsteps = 3\n").unwrap();
        assert_eq!(outcome(out, Existing::Training), "goes");
        fs::remove_file(out.join(CONFIG_FILE)).unwrap();
        // One that was killed before its first step.
        fs::create_dir(out.join(CHECKPOINTS)).unwrap();
        assert_eq!(outcome(out, Existing::Training), "goes");
    }
}
