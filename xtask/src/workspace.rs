//! The paths of a checkout of the workspace, or of an unpacked bundle on a machine without Rust.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::torch::Pair;

/// Name of the file beside the executable that makes it work from a bundle.
pub(crate) const MANIFEST: &str = "bundle.json";

/// The contents of a bundle. Paths are relative to the bundle's top folder.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// Git revision that the binaries were built from.
    pub(crate) revision: String,
    /// Version of libtorch that the binaries need.
    pub(crate) torch: String,
    /// Package to executable.
    pub(crate) programs: BTreeMap<String, PathBuf>,
    /// Test executables in the order in which they run.
    pub(crate) tests: Vec<BundledTest>,
}

/// A prebuilt test executable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct BundledTest {
    /// The package that it tests; it runs in that package's folder.
    pub(crate) package: String,
    /// Name of the test target.
    pub(crate) name: String,
    /// The executable.
    pub(crate) path: PathBuf,
}

/// The top folder, from which all paths are derived.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// Top folder of the checkout or of the bundle.
    pub(crate) root: PathBuf,
    /// `Some` in a bundle: nothing is built and libtorch is in place already.
    pub(crate) bundle: Option<Manifest>,
}

impl Workspace {
    /// A bundle when its manifest is beside this executable, else the workspace that cargo runs this from, else the
    /// one around the working folder.
    pub(crate) fn find() -> Result<Self> {
        let program = std::env::current_exe().context("cannot find the path of this program")?;
        let folder = program.parent().context("this program has no parent folder")?;
        let manifest = folder.join(MANIFEST);
        if manifest.exists() {
            let text = std::fs::read_to_string(&manifest)
                .with_context(|| format!("cannot read {}", manifest.display()))?;
            let bundle = serde_json::from_str(&text)
                .with_context(|| format!("{} is damaged; unpack the bundle again", manifest.display()))?;
            let root = folder.parent().context("the bundle has no top folder")?.to_owned();
            return Ok(Self { root, bundle: Some(bundle) });
        }
        let package = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
        let here = std::env::current_dir().context("the working folder does not exist")?;
        let starts = package.iter().map(PathBuf::as_path).chain([here.as_path()]);
        match starts.flat_map(Path::ancestors).find(|folder| is_workspace(folder)) {
            Some(root) => Ok(Self { root: root.to_owned(), bundle: None }),
            None => bail!("{} is not in a checkout of this project; change to one", here.display()),
        }
    }

    /// Refuses a verb that needs sources when this is a bundle.
    pub(crate) fn need_sources(&self, verb: &str) -> Result<()> {
        if self.bundle.is_some() {
            bail!(
                "`{verb}` needs the sources and a Rust toolchain; a bundle has only run-all, test, compare, gpu-day and report"
            );
        }
        Ok(())
    }

    /// The version of libtorch that the programs link, and of the `tch` that goes with it: what `Cargo.lock` has, or what
    /// the bundle was built with.
    pub(crate) fn pair(&self) -> Result<&'static Pair> {
        match &self.bundle {
            Some(manifest) => Pair::of_torch(&manifest.torch).context("the bundle's manifest"),
            None => Pair::locked(&self.root),
        }
    }

    /// The link to libtorch that every build uses.
    pub(crate) fn libtorch(&self) -> PathBuf {
        self.root.join(".libtorch")
    }

    /// The folder of the peers' scripts and requirements.
    pub(crate) fn peers(&self) -> PathBuf {
        self.root.join("xtask/peers")
    }

    /// The reports that are part of the project.
    pub(crate) fn reports(&self) -> PathBuf {
        self.root.join("reports")
    }

    /// The report of a run at scale smoke.
    pub(crate) fn smoke_reports(&self) -> PathBuf {
        self.root.join("target/smoke-report")
    }
}

fn is_workspace(folder: &Path) -> bool {
    folder.join("Cargo.lock").exists()
        && folder.join("xtask/Cargo.toml").exists()
        && folder.join("crates").is_dir()
}
