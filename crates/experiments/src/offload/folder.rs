//! A temporary folder for layers.

use std::path::{Path, PathBuf};

use anyhow::Context;
use tempfile::TempDir;

/// A folder in `given`, or beside this program, which is on a disk where `/tmp` may be memory. It is removed with the value.
///
/// # Errors
/// A folder that cannot be written.
pub(crate) fn scratch(given: Option<&Path>) -> anyhow::Result<TempDir> {
    let beside = || -> Option<PathBuf> { Some(std::env::current_exe().ok()?.parent()?.to_owned()) };
    let parent = given.map(Path::to_owned).or_else(beside).context("no folder for layers; give --folder")?;
    tempfile::Builder::new().prefix("offload-layers-").tempdir_in(&parent).with_context(|| {
        format!(
            "no folder for layers can be made in {}; give one that can be written as --folder",
            parent.display()
        )
    })
}
