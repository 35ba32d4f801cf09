//! The settings of the machine and of the caller's environment that concern libtorch.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::workspace::Workspace;

/// The inputs to the choice of a libtorch.
#[derive(Clone, Debug, Default)]
pub(crate) struct Environment {
    /// `LIBTORCH` as the caller exported it.
    pub(crate) libtorch: Option<PathBuf>,
    /// The active virtual environment.
    pub(crate) virtual_env: Option<PathBuf>,
    /// The path of the link.
    pub(crate) link: PathBuf,
    /// Whether an NVIDIA driver is visible.
    pub(crate) driver: bool,
}

impl Environment {
    pub(crate) fn of_this_process(workspace: &Workspace) -> Self {
        let path = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let link = workspace.libtorch();
        Self {
            // Cargo itself sets it to the link when the caller exported nothing.
            libtorch: path("LIBTORCH").filter(|folder| folder != &link),
            virtual_env: path("VIRTUAL_ENV"),
            link,
            driver: nvidia_driver(),
        }
    }
}

/// Whether this machine has an NVIDIA driver that a program can reach. Containers show it in different places.
pub(crate) fn nvidia_driver() -> bool {
    const LIBRARIES: [&str; 5] = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/local/nvidia/lib64",
        "/usr/lib/wsl/lib",
    ];
    let searched = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut folders = LIBRARIES.iter().map(PathBuf::from).chain(std::env::split_paths(&searched));
    ["/proc/driver/nvidia/version", "/dev/nvidiactl"].iter().any(|file| Path::new(file).exists())
        || folders.any(|folder| folder.join("libcuda.so.1").exists())
}

/// The folder that all checkouts of this user share.
pub(crate) fn cache_folder() -> Result<PathBuf> {
    let folder = choose_cache(|name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from));
    let folder =
        folder.context("there is no home folder to keep libtorch in; set FRUGAL_CACHE to a folder")?;
    std::path::absolute(&folder).with_context(|| format!("{} is not a usable path", folder.display()))
}

fn choose_cache(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    // The base-directory specification ignores a relative XDG path.
    let xdg = || variable("XDG_CACHE_HOME").filter(|path| path.is_absolute()).map(|path| path.join("frugal"));
    let home = || variable("HOME").map(|home| home.join(".cache/frugal"));
    variable("FRUGAL_CACHE").or_else(xdg).or_else(home)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_folder_follows_the_variables_in_order() {
        let check = |set: &[(&str, &str)], expected: Option<&str>| {
            let variable =
                |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, value)| PathBuf::from(value));
            assert_eq!(choose_cache(variable), expected.map(PathBuf::from), "{set:?}");
        };
        let (home, xdg, frugal_cache) = (("HOME", "/h"), ("XDG_CACHE_HOME", "/x"), ("FRUGAL_CACHE", "/f"));
        check(&[home, xdg, frugal_cache], Some("/f"));
        check(&[home, xdg], Some("/x/frugal"));
        check(&[home, ("XDG_CACHE_HOME", "relative")], Some("/h/.cache/frugal"));
        check(&[home], Some("/h/.cache/frugal"));
        check(&[], None);
    }
}
