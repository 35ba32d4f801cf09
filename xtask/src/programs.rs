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
    /// Builds the programs of `packages` in release mode, or takes them from the bundle.
    pub(crate) fn prepare_release(
        workspace: &'a Workspace,
        packages: &[String],
        device: Device,
    ) -> Result<Self> {
        Self::prepare(workspace, packages, device, Optimization::Release)
    }

    /// Builds the programs of `packages`, or takes them from the bundle, whose programs ignore `optimization`.
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
            None => {
                setup::ensure(workspace, device.variant())?;
                cargo::build_programs(workspace, packages, optimization)?
            }
        };
        let programs =
            paths.into_iter().map(|(name, path)| (name, Program { path, digest: OnceLock::new() })).collect();
        Ok(Self { workspace, programs, revision: revision::current(workspace) })
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

/// Returns the names of packages, sorted, each once.
pub(crate) fn packages<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut packages: Vec<String> = names.map(str::to_owned).collect();
    packages.sort();
    packages.dedup();
    packages
}
