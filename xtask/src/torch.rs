//! A libtorch folder: which version it is, and whether CUDA can be reached through it.

mod pairs;

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

pub(crate) use pairs::Pair;

/// The devices of a libtorch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Variant {
    Cpu,
    Cuda,
}

impl Variant {
    /// The variant in the name of a private environment.
    pub(crate) fn lower(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "CPU",
            Self::Cuda => "CUDA",
        })
    }
}

/// A folder with `lib` and `include` that a build can use.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Torch {
    pub(crate) folder: PathBuf,
    /// The version with its local part, for example `2.11.0+cu130`.
    pub(crate) version: String,
    pub(crate) variant: Variant,
}

impl Torch {
    /// Reads the libtorch in `folder`.
    pub(crate) fn inspect(folder: &Path) -> Result<Self> {
        let library = format!("libtorch_cpu.{}", if cfg!(target_os = "macos") { "dylib" } else { "so" });
        if !folder.exists() {
            bail!("{} does not exist", folder.display());
        }
        if !folder.join("lib").join(&library).exists() {
            bail!("{} is no libtorch: it has no lib/{library}", folder.display());
        }
        if !folder.join("include/torch/csrc/autograd/function.h").exists() {
            bail!("the libtorch in {} has no headers (include/torch/csrc/…)", folder.display());
        }
        let version = read_version(folder)?;
        let variant = if reaches_cuda(folder) { Variant::Cuda } else { Variant::Cpu };
        Ok(Self { folder: folder.to_owned(), version, variant })
    }

    /// Whether the `tch` of `pair` can be built against it.
    pub(crate) fn fits(&self, pair: &Pair) -> bool {
        public_version(&self.version) == pair.torch
    }
}

/// `bin/python` of the environment that the link `libtorch` points into: a wheel is in `lib/python3.N/site-packages/torch`.
pub(crate) fn python_beside(libtorch: &Path) -> Option<PathBuf> {
    let folder = libtorch.canonicalize().ok()?;
    let python = folder.ancestors().nth(4)?.join("bin/python");
    python.is_file().then_some(python)
}

/// The version without its local part: `2.11.0` of `2.11.0+cu130`.
pub(crate) fn public_version(version: &str) -> &str {
    version.split('+').next().unwrap_or(version).trim()
}

/// A wheel has its version in `version.py`, an unpacked archive in `build-version`.
fn read_version(folder: &Path) -> Result<String> {
    for (file, parse) in [
        ("version.py", version_of_python as fn(&str) -> Option<String>),
        ("build-version", version_of_archive as fn(&str) -> Option<String>),
    ] {
        let path = folder.join(file);
        if path.exists() {
            let text =
                std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            return parse(&text).with_context(|| format!("{} states no version", path.display()));
        }
    }
    bail!("the libtorch in {} does not say its version (no version.py, no build-version)", folder.display())
}

fn version_of_python(text: &str) -> Option<String> {
    let value =
        text.lines().find_map(|line| line.strip_prefix("__version__")?.trim_start().strip_prefix('='))?;
    let value = value.trim().trim_matches(['\'', '"']);
    (!value.is_empty()).then(|| value.to_owned())
}

fn version_of_archive(text: &str) -> Option<String> {
    let value = text.lines().next()?.trim();
    value.starts_with(|c: char| c.is_ascii_digit()).then(|| value.to_owned())
}

/// A wheel always contains `libtorch_cuda`, and cannot load it without cuBLAS: that one decides.
fn reaches_cuda(folder: &Path) -> bool {
    if !folder.join("lib/libtorch_cuda.so").exists() {
        return false;
    }
    let beside = folder.canonicalize().ok().and_then(|real| Some(real.parent()?.join("nvidia")));
    let nvidia = beside.and_then(|nvidia| std::fs::read_dir(nvidia).ok()).into_iter().flatten().flatten();
    let folders = nvidia.map(|package| package.path().join("lib")).chain([folder.join("lib")]);
    folders.filter_map(|lib| std::fs::read_dir(lib).ok()).flatten().flatten().any(|file| {
        let name = file.file_name();
        let name = name.to_string_lossy();
        // `libcublas-<hash>.so.12` is how an archive with everything inside calls it.
        name.starts_with("libcublas.so") || name.starts_with("libcublas-")
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A folder that passes for a libtorch of `version`.
    pub(crate) fn fake_torch(folder: &Path, version: &str, cuda: bool) {
        let touch = |path: PathBuf, text: &str| {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        touch(folder.join("lib/libtorch_cpu.so"), "");
        touch(folder.join("lib/libtorch_cuda.so"), "");
        touch(folder.join("include/torch/csrc/autograd/function.h"), "");
        touch(folder.join("version.py"), &format!("__version__ = '{version}'\n"));
        if cuda {
            touch(folder.parent().unwrap().join("nvidia/cu13/lib/libcublas.so.13"), "");
        }
    }

    #[test]
    fn versions_are_read_from_both_kinds_of_file() {
        let python = "from typing import Optional\n\n__all__ = ['__version__', 'debug']\n__version__ = '2.11.0+cu130'\n";
        assert_eq!(version_of_python(python).as_deref(), Some("2.11.0+cu130"));
        assert_eq!(version_of_python("__version__=\"2.9.1\"").as_deref(), Some("2.9.1"));
        assert_eq!(version_of_python("debug = False"), None);
        assert_eq!(version_of_archive("2.11.0+cpu\n").as_deref(), Some("2.11.0+cpu"));
        assert_eq!(version_of_archive("<html>"), None);
        assert_eq!(public_version("2.11.0+cu130"), "2.11.0");
        assert_eq!(public_version("2.11.0"), "2.11.0");
    }

    #[test]
    fn a_wheel_reaches_cuda_only_with_cublas_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        for (name, cuda, variant) in [("cpu", false, Variant::Cpu), ("cuda", true, Variant::Cuda)] {
            let folder = dir.path().join(name).join("torch");
            fake_torch(&folder, "2.11.0+cu130", cuda);
            let torch = Torch::inspect(&folder).unwrap();
            assert_eq!(torch.variant, variant);
            assert!(torch.fits(Pair::of_torch("2.11").unwrap()));
            assert!(!torch.fits(Pair::of_torch("2.13").unwrap()));
        }
    }

    #[test]
    fn what_is_no_libtorch_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let message = |folder: &Path| Torch::inspect(folder).unwrap_err().to_string();
        assert!(message(dir.path()).contains("it has no lib/libtorch_cpu"));
        let folder = dir.path().join("torch");
        fake_torch(&folder, "2.11.0", false);
        std::fs::remove_file(folder.join("version.py")).unwrap();
        assert!(message(&folder).contains("does not say its version"));
        std::fs::remove_dir_all(folder.join("include")).unwrap();
        assert!(message(&folder).contains("has no headers"));
    }
}
