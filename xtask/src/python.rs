//! The Python interpreter that libtorch's wheels are installed with.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

/// Minor versions of Python 3 for which torch has wheels.
const WHEELS: std::ops::RangeInclusive<u32> = 10..=14;

/// An interpreter that can make a virtual environment with pip in it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Python {
    pub(crate) program: PathBuf,
    pub(crate) version: (u32, u32),
}

impl Python {
    /// The first of `python3` and `python3.N` that torch has wheels for; errors name the version of `torch`.
    pub(crate) fn find(torch: &str) -> Result<Self> {
        let names =
            std::iter::once("python3".to_owned()).chain(WHEELS.rev().map(|minor| format!("python3.{minor}")));
        let mut outside = None;
        for name in names {
            let Some(version) = version_of(Path::new(&name)) else { continue };
            let python = Self { program: name.into(), version };
            if version.0 == 3 && WHEELS.contains(&version.1) {
                python.check_venv(torch)?;
                return Ok(python);
            }
            outside.get_or_insert(python);
        }
        match outside {
            Some(python) => bail!(
                "torch {torch} has wheels for Python 3.{} to 3.{}, and {} is Python {}.{}; {}",
                WHEELS.start(),
                WHEELS.end(),
                python.program.display(),
                python.version.0,
                python.version.1,
                remedy(torch, &format!("install python3.{} beside it", WHEELS.end() - 1)),
            ),
            None => bail!(
                "python3 was not found, and installing libtorch needs it; {}",
                remedy(
                    torch,
                    "install it (Debian, Ubuntu: sudo apt install python3 python3-venv; Fedora: sudo dnf install python3)"
                ),
            ),
        }
    }

    /// Debian ships Python without the parts that make a virtual environment.
    fn check_venv(&self, torch: &str) -> Result<()> {
        if succeeds(Command::new(&self.program).args(["-c", "import venv, ensurepip"])) {
            return Ok(());
        }
        let (major, minor) = self.version;
        bail!(
            "{} (Python {major}.{minor}) cannot make virtual environments: its venv or ensurepip module is missing; {}",
            self.program.display(),
            remedy(
                torch,
                &format!(
                    "install it (Debian, Ubuntu: sudo apt install python{major}.{minor}-venv; Fedora: sudo dnf install \
                     python3-pip)"
                )
            ),
        )
    }
}

/// Adds to a remedy the one that needs no Python.
fn remedy(torch: &str, install: &str) -> String {
    format!("{install}, or set LIBTORCH to the folder of a libtorch {torch} with headers")
}

/// `(3, 11)` for an interpreter that runs.
pub(crate) fn version_of(program: &Path) -> Option<(u32, u32)> {
    let output = Command::new(program)
        .args(["-c", "import sys; print(sys.version_info[0], sys.version_info[1])"])
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    parse_version(&String::from_utf8_lossy(&output.stdout))
}

fn parse_version(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.trim().split_once(' ')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_two_numbers() {
        assert_eq!(parse_version("3 11\n"), Some((3, 11)));
        assert_eq!(parse_version("Python 2.7"), None);
        assert_eq!(parse_version(""), None);
    }

    #[test]
    fn a_missing_interpreter_has_no_version() {
        assert_eq!(version_of(Path::new("/nonexistent/python3")), None);
    }
}
