//! The Python that the peers run in.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::house::House;
use crate::setup::cache_folder;
use crate::torch::{TORCH_VERSION, public_version};
use crate::venv::{self, Recipe};

/// The interpreter that was given, else the bundle's, else a private environment's.
pub(super) fn python(house: &House, given: Option<&Path>) -> Result<PathBuf> {
    let bundled =
        || house.bundle.is_some().then(|| std::env::var_os("FRUGAL_PYTHON").unwrap_or("python3".into()));
    if let Some(python) = given.map(|given| given.as_os_str().to_owned()).or_else(bundled) {
        let python = PathBuf::from(python);
        check(&python)?;
        // The peers start in another folder. A bare name is looked up on the path, wherever that is.
        let is_name = python.components().count() == 1 && !python.is_absolute();
        return if is_name {
            Ok(python)
        } else {
            std::path::absolute(&python).context("--python is no usable path")
        };
    }
    let file = house.peers().join("requirements.txt");
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let packages = packages(&text);
    let recipe = Recipe {
        name: format!("peers-torch-{TORCH_VERSION}"),
        what: format!("the peers' {}", packages.join(", ")),
        size: "4.8 GB",
        fingerprint: packages.join(" "),
        packages: packages.clone(),
    };
    let modules: Vec<&str> = packages.iter().map(|package| module(package)).collect();
    let venv = venv::ensure(&cache_folder()?, &recipe, |folder| {
        version_with(&venv::python_of(folder), &modules).is_ok_and(|version| version == TORCH_VERSION)
    })?;
    if let Some(time) = venv.made_in {
        eprintln!("compare: installed {} in {:.1} s", recipe.what, time.as_secs_f64());
    }
    Ok(venv.python())
}

/// Refuses an interpreter whose torch would make an unfair peer.
fn check(python: &Path) -> Result<()> {
    let version = version_with(python, &["torch"])
        .with_context(|| format!("{} is no Python with torch; give --python another", python.display()))?;
    if version != TORCH_VERSION {
        bail!(
            "{} has torch {version}, and the comparison is with {TORCH_VERSION}; give --python one that has it",
            python.display()
        );
    }
    Ok(())
}

/// The version of torch where all of `modules` can be imported.
fn version_with(python: &Path, modules: &[&str]) -> Result<String> {
    let script = format!("import {}; import torch; print(torch.__version__)", modules.join(", "));
    let mut command = Command::new(python);
    // Its own libtorch, not the one that our programs link.
    let output = command.args(["-c", &script]).output();
    let output = output.with_context(|| format!("cannot run {}", python.display()))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("{}", text.lines().next_back().unwrap_or("it said nothing").trim());
    }
    Ok(public_version(&String::from_utf8_lossy(&output.stdout)).to_owned())
}

/// The requirements without comments.
fn packages(text: &str) -> Vec<String> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    lines.filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// The module that a requirement brings; the peers need only packages whose module has the same name.
fn module(package: &str) -> &str {
    package.split(['=', '<', '>', '~', '!', '[', ';', ' ']).next().unwrap_or(package)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_are_packages_and_modules() {
        let packages = packages("# peers\ntorch==2.11.0\n\nnumpy  # arrays\ntransformers[torch]>=5\n");
        assert_eq!(packages, ["torch==2.11.0", "numpy", "transformers[torch]>=5"]);
        let modules: Vec<&str> = packages.iter().map(|package| module(package)).collect();
        assert_eq!(modules, ["torch", "numpy", "transformers"]);
    }

    #[test]
    fn what_is_no_python_says_so() {
        let message = format!("{:#}", check(Path::new("/nonexistent/python")).unwrap_err());
        assert!(
            message.starts_with(
                "/nonexistent/python is no Python with torch; give --python another: cannot run"
            )
        );
    }

    #[test]
    fn the_requirements_pin_the_torch_that_tch_expects() {
        let text = include_str!("../../peers/requirements.txt");
        assert_eq!(packages(text)[0], format!("torch=={TORCH_VERSION}"));
    }
}
