//! NVIDIA's run-time compiler and disassembler, which need no GPU: with them the tests run every CUDA kernel on the processor.
//!
//! They are in an environment of their own, so that a torch of the user's is never changed, and linked as `.cuda-tools`, which
//! `.cargo/config.toml` names to what runs (`FRUGAL_CUDA_TOOLS`).

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::{cache_folder, link};
use crate::torch::Pair;
use crate::venv::{self, Recipe};
use crate::workspace::Workspace;

/// The compiler that the pinned figures of the kernels are of; the disassembler reads the machine code of older compilers.
const PACKAGES: [&str; 3] = ["--no-deps", "nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-nvdisasm==13.5.37"];

/// Where they are.
pub(crate) struct CudaTools {
    /// The folder with NVRTC.
    pub(crate) libraries: PathBuf,
    /// The environment's Python.
    pub(crate) python: PathBuf,
    /// NVIDIA's disassembler.
    pub(crate) disassembler: PathBuf,
}

/// Makes sure that `.cuda-tools` leads to them, and prints a line about it.
pub(super) fn ensure(workspace: &Workspace, pair: &Pair) -> Result<CudaTools> {
    if !cfg!(target_os = "linux") {
        bail!("NVIDIA's compiler is for Linux; the tests of CUDA kernels say that they are skipped");
    }
    let venv = venv::ensure(&cache_folder()?, &recipe(pair), |folder| tools(folder).is_some())?;
    let tools = tools(&venv.folder).context("pip installed no compiler")?;
    if venv.made_in.is_some() {
        remove_variant(&tools.join("cu13/lib"));
    }
    link(&workspace.root.join(".cuda-tools"), &tools)?;
    eprintln!("setup: CUDA's compiler in {}, linked as .cuda-tools", tools.display());
    Ok(CudaTools {
        libraries: tools.join("cu13/lib"),
        python: venv.python(),
        disassembler: tools.join("cu13/bin/nvdisasm"),
    })
}

fn recipe(pair: &Pair) -> Recipe {
    Recipe {
        name: "cuda-tools-13.0".into(),
        what: "CUDA's compiler and disassembler".into(),
        // Python for it is Python for torch.
        torch: pair.torch.into(),
        size: "0.2 GB",
        fingerprint: PACKAGES.join(" "),
        packages: PACKAGES.map(str::to_owned).to_vec(),
    }
}

/// The folder `nvidia` of an environment, if the tools are in it.
fn tools(folder: &Path) -> Option<PathBuf> {
    let tools = venv::site_packages(folder)?.join("nvidia");
    let library = |beginning: &str| {
        let entries = std::fs::read_dir(tools.join("cu13/lib")).into_iter().flatten().flatten();
        entries.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with(beginning))
    };
    let is_complete = library("libnvrtc.so.")
        && library("libnvrtc-builtins.so.")
        && tools.join("cu13/bin/nvdisasm").is_file();
    is_complete.then_some(tools)
}

/// Removes the second build of the compiler, half of the package, which nothing here loads. Where it stays, it only takes room.
fn remove_variant(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().contains(".alt.") {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_there_when_all_of_them_are() {
        let dir = tempfile::tempdir().unwrap();
        let nvidia = dir.path().join("lib/python3.11/site-packages/nvidia");
        for folder in ["cu13/lib", "cu13/bin"] {
            std::fs::create_dir_all(nvidia.join(folder)).unwrap();
        }
        let files = ["lib/libnvrtc.so.13", "lib/libnvrtc-builtins.so.13.0", "bin/nvdisasm"];
        for file in files {
            assert_eq!(tools(dir.path()), None, "without {file}");
            std::fs::write(nvidia.join("cu13").join(file), "").unwrap();
        }
        let variant = nvidia.join("cu13/lib/libnvrtc.alt.so.13");
        std::fs::write(&variant, "").unwrap();
        remove_variant(&nvidia.join("cu13/lib"));
        assert!(!variant.exists());
        assert_eq!(tools(dir.path()), Some(nvidia));
    }
}
