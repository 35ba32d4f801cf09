//! The measured programs: built from source, or taken from the bundle.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result};

use crate::cargo::{self, Optimization};
use crate::device::Device;
use crate::workspace::Workspace;
use crate::{revision, setup, stamp};

/// In this variable a parent process that has built the programs gives their paths, as JSON by package, so that its children build nothing.
const VARIABLE: &str = "FRUGAL_PROGRAMS";

/// Executable programs by package.
pub(crate) struct Programs<'a> {
    workspace: &'a Workspace,
    programs: BTreeMap<String, Program>,
    /// The revision of the sources, which the programs write into their records.
    pub(crate) revision: String,
}

struct Program {
    path: PathBuf,
    /// Computed on first use, because it reads a file of a hundred megabytes.
    digest: OnceLock<String>,
}

impl<'a> Programs<'a> {
    /// Builds the programs of `packages`, or takes those of the parent process or of the bundle, which ignore `optimization`.
    pub(crate) fn prepare(
        workspace: &'a Workspace,
        packages: &[String],
        device: Device,
        optimization: Optimization,
    ) -> Result<Self> {
        let paths = match &workspace.bundle {
            Some(bundle) => {
                bundle.programs.iter().map(|(name, path)| (name.clone(), workspace.root.join(path))).collect()
            }
            None => match given(packages) {
                Some(given) => given,
                None => {
                    setup::ensure(workspace, device.variant())?;
                    cargo::build_programs(workspace, packages, optimization)?
                }
            },
        };
        Ok(Self::of(workspace, paths))
    }

    /// The programs of a checkout that stand beside its tests, which are built too: one build for both.
    pub(crate) fn beside_tests(
        workspace: &'a Workspace,
        packages: &[String],
        device: Device,
    ) -> Result<Self> {
        setup::ensure(workspace, device.variant())?;
        let made = cargo::executables(workspace, &["test", "--workspace", "--tests", "--no-run"])?;
        let programs = made.into_iter().filter(|executable| !executable.test);
        let paths: BTreeMap<_, _> = programs.map(|program| (program.package, program.path)).collect();
        if packages.iter().all(|package| paths.contains_key(package)) {
            return Ok(Self::of(workspace, paths));
        }
        Self::prepare(workspace, packages, device, Optimization::Dev)
    }

    fn of(workspace: &'a Workspace, paths: BTreeMap<String, PathBuf>) -> Self {
        let programs =
            paths.into_iter().map(|(name, path)| (name, Program { path, digest: OnceLock::new() })).collect();
        Self { workspace, programs, revision: revision::current(workspace) }
    }

    /// Lets `command`, a verb of this program, take these programs instead of building its own.
    pub(crate) fn give(&self, command: &mut Command) -> Result<()> {
        let paths: BTreeMap<&str, &PathBuf> =
            self.programs.iter().map(|(name, program)| (&**name, &program.path)).collect();
        command.env(VARIABLE, serde_json::to_string(&paths).context("the paths of programs")?);
        Ok(())
    }

    fn program(&self, package: &str) -> Result<&Program> {
        let program = self.programs.get(package);
        program.with_context(|| format!("the bundle has no program {package}; build the bundle again"))
    }

    /// Returns the digest of the executable of `package`.
    pub(crate) fn digest(&self, package: &str) -> Result<&str> {
        let program = self.program(package)?;
        if let Some(digest) = program.digest.get() {
            return Ok(digest);
        }
        let digest = stamp::digest(&program.path)?;
        Ok(program.digest.get_or_init(|| digest))
    }

    /// Returns a command that runs the program of `package`, with libtorch on its library path.
    pub(crate) fn command(&self, package: &str) -> Result<Command> {
        let mut command = Command::new(&self.program(package)?.path);
        cargo::with_libtorch(&mut command, self.workspace);
        command.env(revision::VARIABLE, &self.revision).current_dir(&self.workspace.root);
        // The robustness experiment runs this xtask as a child, and kills it.
        command.env("FRUGAL_XTASK", std::env::current_exe().context("finding this program")?);
        Ok(command)
    }
}

/// The programs that a parent process has built, if all of `packages` are among them.
fn given(packages: &[String]) -> Option<BTreeMap<String, PathBuf>> {
    let paths: BTreeMap<String, PathBuf> = serde_json::from_str(&std::env::var(VARIABLE).ok()?).ok()?;
    packages.iter().all(|package| paths.contains_key(package)).then_some(paths)
}

/// Returns the names of packages, sorted, each once.
pub(crate) fn packages<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut packages: Vec<String> = names.map(str::to_owned).collect();
    packages.sort();
    packages.dedup();
    packages
}
