//! The Python that the peers run in.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use report::cli::Failure;
use report::spec::{Comparison, PeerTorch};

use crate::setup::cache_folder;
use crate::torch::{Pair, public_version};
use crate::venv::{self, Recipe};
use crate::workspace::Workspace;

/// An interpreter for each PyTorch that the chosen comparisons want.
pub(super) struct Pythons(Vec<(PeerTorch, PathBuf)>);

impl Pythons {
    /// Returns the given interpreter, else the bundle's, else those of private environments.
    pub(super) fn ready(workspace: &Workspace, given: Option<&Path>, chosen: &[Comparison]) -> Result<Self> {
        let file = workspace.peers().join("requirements.txt");
        let text =
            std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let requirements = Requirements::parse(&text).with_context(|| file.display().to_string())?;
        let pair = workspace.pair()?;
        let bundled = || {
            workspace.bundle.is_some().then(|| std::env::var_os("FRUGAL_PYTHON").unwrap_or("python3".into()))
        };
        let given = given.map(|given| given.as_os_str().to_owned()).or_else(bundled).map(PathBuf::from);
        let mut pythons: Vec<(PeerTorch, PathBuf)> = Vec::new();
        for comparison in chosen {
            let wanted = comparison.peer_torch;
            if let Some(python) = &given {
                needs_modules(python, comparison)?;
            }
            if pythons.iter().any(|(torch, _)| *torch == wanted) {
                continue;
            }
            let python = match &given {
                Some(python) => {
                    check(python, &requirements, pair, comparison)?;
                    from_anywhere(python)?
                }
                None => installed(&requirements, requirements.version(wanted, pair))?,
            };
            pythons.push((wanted, python));
        }
        Ok(Self(pythons))
    }

    /// The interpreter with this PyTorch.
    pub(super) fn with(&self, torch: PeerTorch) -> &Path {
        let environment = self.0.iter().find(|(has, _)| *has == torch);
        &environment.expect("there is one for each chosen comparison").1
    }
}

/// Makes a path absolute, since the peers start in another folder. A bare name is looked up on `PATH`.
fn from_anywhere(python: &Path) -> Result<PathBuf> {
    let is_name = python.components().count() == 1 && !python.is_absolute();
    if is_name {
        return Ok(python.to_owned());
    }
    std::path::absolute(python).context("--python is not a usable path")
}

/// Returns the private environment with this torch, created if missing.
fn installed(requirements: &Requirements, torch: &str) -> Result<PathBuf> {
    let packages = requirements.packages(torch);
    let recipe = Recipe {
        name: format!("peers-torch-{torch}"),
        what: format!("the peers' {}", packages.join(", ")),
        torch: torch.into(),
        size: "4.8 GB",
        fingerprint: packages.join(" "),
        packages: packages.clone(),
    };
    let modules: Vec<&str> = packages.iter().map(|package| module(package)).collect();
    let venv = venv::ensure(&cache_folder()?, &recipe, |folder| {
        version_with(&venv::python_of(folder), &modules).is_ok_and(|version| version == torch)
    })?;
    if let Some(time) = venv.made_in {
        eprintln!("compare: installed {} in {:.1} s", recipe.what, time.as_secs_f64());
    }
    Ok(venv.python())
}

/// Refuses an interpreter whose torch would make an unfair peer: neither the newest nor the one that our programs link,
/// or not the latter where the comparison is of the same kernels.
fn check(python: &Path, requirements: &Requirements, pair: &Pair, comparison: &Comparison) -> Result<()> {
    let version = version_with(python, &["torch"]).with_context(|| {
        format!("{} is not a Python with torch; give another with --python", python.display())
    })?;
    let (newest, linked) = (&requirements.torch, pair.torch);
    let wanted = match comparison.peer_torch {
        _ if version == linked => return Ok(()),
        PeerTorch::Newest if version == *newest => return Ok(()),
        PeerTorch::Newest => format!("needs {newest}, the newest, or {linked}, which our programs link"),
        PeerTorch::Linked => {
            format!("needs {linked}, which our programs link, so that both run the same kernels")
        }
    };
    bail!(
        "{} has torch {version}, and the comparison {} {wanted}; give --python one that has it, or leave the comparison \
         out with --only",
        python.display(),
        comparison.name
    )
}

/// The exit status where the Python lacks a module that a peer imports: a comparison that cannot be made here, not one that failed.
pub(crate) const NO_MODULE: u8 = 4;

/// Refuses an interpreter that lacks a module which the comparison's peer imports.
fn needs_modules(python: &Path, comparison: &Comparison) -> Result<()> {
    if comparison.peer_modules.is_empty() {
        return Ok(());
    }
    let script =
        "import importlib.util, sys; print(*[m for m in sys.argv[1:] if not importlib.util.find_spec(m)])";
    let mut command = Command::new(python);
    let output = command.args(["-c", script]).args(&comparison.peer_modules).output();
    let output = output.with_context(|| format!("cannot run {}", python.display()))?;
    let missing = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if missing.is_empty() {
        return Ok(());
    }
    let message = format!(
        "{} has no {missing}, which the comparison {} needs; give another Python with --python",
        python.display(),
        comparison.name
    );
    Err(Failure { status: NO_MODULE, message }.into())
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
        bail!("{}", text.lines().next_back().unwrap_or("no output").trim());
    }
    Ok(public_version(&String::from_utf8_lossy(&output.stdout)).to_owned())
}

/// The Python packages of the peers.
#[derive(Debug, PartialEq)]
struct Requirements {
    /// The newest torch.
    torch: String,
    /// The other packages, as arguments of pip.
    others: Vec<String>,
}

impl Requirements {
    /// Reads a requirements file, which pins torch.
    fn parse(text: &str) -> Result<Self> {
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
        let (torch, others): (Vec<_>, Vec<_>) = lines
            .filter(|line| !line.is_empty())
            .map(str::to_owned)
            .partition(|line| module(line) == "torch");
        match torch.as_slice() {
            [one] if one.starts_with("torch==") => {
                Ok(Self { torch: one["torch==".len()..].trim().to_owned(), others })
            }
            _ => bail!("has no line `torch==VERSION`, or several"),
        }
    }

    /// The version of torch that `wanted` means.
    fn version<'a>(&'a self, wanted: PeerTorch, pair: &'a Pair) -> &'a str {
        match wanted {
            PeerTorch::Newest => &self.torch,
            PeerTorch::Linked => pair.torch,
        }
    }

    /// The arguments of pip for this torch.
    fn packages(&self, torch: &str) -> Vec<String> {
        std::iter::once(format!("torch=={torch}")).chain(self.others.iter().cloned()).collect()
    }
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
        let text = "# peers\ntorch==2.15.0\n\nnumpy  # arrays\ntransformers[torch]>=5\n";
        let requirements = Requirements::parse(text).unwrap();
        let packages = requirements.packages("2.13.0");
        assert_eq!(packages, ["torch==2.13.0", "numpy", "transformers[torch]>=5"]);
        let modules: Vec<&str> = packages.iter().map(|package| module(package)).collect();
        assert_eq!(modules, ["torch", "numpy", "transformers"]);
        for wrong in ["numpy\n", "torch>=2\n", "torch==1\ntorch==2\n"] {
            assert!(Requirements::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_comparison_of_the_same_kernels_takes_the_linked_torch() {
        let requirements = Requirements::parse(include_str!("../../peers/requirements.txt")).unwrap();
        let pair = Pair::of_torch("2.11").unwrap();
        assert_eq!(requirements.version(PeerTorch::Linked, pair), "2.11.0");
        assert_eq!(requirements.version(PeerTorch::Newest, pair), requirements.torch);
    }
}
