//! A file of results at a path that a person gave.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use files::atomic_write;

use crate::flags::hub::same_folder;

/// Where results will be written. It is checked before the work, and written as a whole after it: beside its place first, and renamed.
#[derive(Debug)]
pub(crate) struct OutputFile {
    path: PathBuf,
}

/// The flag that names a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputFlag {
    pub(crate) name: &'static str,
    /// Whether `--overwrite` is given; `None` where there is no such flag.
    pub(crate) overwrite: Option<bool>,
}

impl OutputFile {
    /// Refuses a path that is one of the inputs, a file that exists unless it is to be replaced, a folder, and a place that cannot be
    /// written: hours of work must not end there.
    ///
    /// # Errors
    /// Such a path, by name.
    pub(crate) fn new(path: &Path, flag: &OutputFlag, inputs: &[&Path]) -> anyhow::Result<Self> {
        let shown = format!("{} {}", flag.name, path.display());
        if let Some(input) = inputs.iter().find(|input| path.exists() && same_folder(input, path)) {
            bail!("{shown} is {}, which is read; give another", input.display());
        }
        if path.is_dir() {
            bail!("{shown} is a folder; give a file");
        }
        if is_special(path) {
            return Ok(Self { path: path.to_owned() });
        }
        match flag.overwrite {
            _ if !path.exists() => {}
            Some(true) => {}
            Some(false) => bail!("{shown} exists; give another, or --overwrite to replace what is there"),
            None => bail!("{shown} exists; give another"),
        }
        let folder = atomic_write::parent(path);
        tempfile::tempfile_in(folder).with_context(|| format!("{shown} cannot be written"))?;
        Ok(Self { path: path.to_owned() })
    }

    /// Writes the file.
    ///
    /// # Errors
    /// Any error of `content`; a folder that cannot be written, or is full.
    pub(crate) fn write(&self, content: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> anyhow::Result<()> {
        let written = match is_special(&self.path) {
            true => {
                fs::OpenOptions::new().write(true).open(&self.path).and_then(|mut file| content(&mut file))
            }
            false => atomic_write::file(&self.path, content),
        };
        written.with_context(|| format!("{} cannot be written", self.path.display()))
    }
}

/// Whether a path is a pipe, a terminal or a device, which is written and never replaced.
fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_appears_whole_and_nothing_is_replaced_unasked() {
        let folder = tempfile::tempdir().unwrap();
        let [input, out] = ["qa.jsonl", "answers.jsonl"].map(|name| folder.path().join(name));
        fs::write(&input, "questions").unwrap();
        let new = |path: &Path, overwrite| {
            let flag = OutputFlag { name: "--out", overwrite: Some(overwrite) };
            OutputFile::new(path, &flag, &[&input]).map_err(|error| format!("{error:#}"))
        };
        for overwrite in [false, true] {
            assert!(new(&input, overwrite).unwrap_err().contains("which is read; give another"));
            assert!(new(folder.path(), overwrite).unwrap_err().contains("is a folder"));
            let nowhere = folder.path().join("none/answers.jsonl");
            assert!(new(&nowhere, overwrite).unwrap_err().contains("cannot be written"));
        }
        let file = new(&out, false).unwrap();
        assert!(!out.exists());
        assert!(file.write(|_| Err(io::Error::other("full"))).is_err());
        assert!(!out.exists());
        file.write(|out| out.write_all(b"one")).unwrap();
        assert!(new(&out, false).unwrap_err().contains("exists; give another, or --overwrite"));
        new(&out, true).unwrap().write(|out| out.write_all(b"two")).unwrap();
        assert_eq!(fs::read_to_string(&out).unwrap(), "two");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[cfg(unix)]
    #[test]
    fn a_device_is_written_and_stays() {
        let (null, flag) = (Path::new("/dev/null"), OutputFlag { name: "--trace", overwrite: None });
        OutputFile::new(null, &flag, &[]).unwrap().write(|out| out.write_all(b"one")).unwrap();
        assert!(is_special(null));
    }
}
