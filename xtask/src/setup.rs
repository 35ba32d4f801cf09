//! `cargo xtask setup`: finds or installs libtorch and links it as `.libtorch`; with `--torch`, another version of it.

mod compiler;
mod cuda_tools;
mod decision;
mod environment;
mod models;

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::cargo;
use crate::torch::{Pair, Torch, Variant};
use crate::venv::{self, Recipe};
use crate::workspace::Workspace;
pub(crate) use cuda_tools::CudaTools;
use decision::{Decision, decide};
pub(crate) use environment::{Environment, cache_folder, nvidia_driver};

/// Which libtorch is wanted.
#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// Install the CUDA packages even if no NVIDIA driver is found
    #[arg(long, conflicts_with = "cpu")]
    cuda: bool,
    /// Install the CPU packages even if an NVIDIA driver is found
    #[arg(long)]
    cpu: bool,
    /// Switch to this torch version and the matching tch; changes Cargo.lock
    #[arg(long, value_name = "VERSION", value_parser = Pair::of_torch)]
    torch: Option<&'static Pair>,
    /// Also install NVIDIA's CUDA compiler, with which the tests run CUDA kernels without a GPU
    #[arg(long)]
    cuda_tools: bool,
    /// Also download pretrained models in GGUF files (0.8 GB), for the tests and experiments that need real weights
    #[arg(long)]
    models: bool,
}

impl Args {
    fn wanted(&self) -> Option<Variant> {
        match (self.cuda, self.cpu) {
            (true, _) => Some(Variant::Cuda),
            (_, true) => Some(Variant::Cpu),
            _ => None,
        }
    }
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    workspace.need_sources("setup")?;
    match args.torch {
        Some(pair) => switch(workspace, pair, args.wanted()),
        None => ensure(workspace, args.wanted()).map(drop),
    }?;
    if args.cuda_tools {
        cuda_tools(workspace)?;
    }
    if args.models { models::ensure(workspace) } else { Ok(()) }
}

/// Makes sure that CUDA's compiler is there, without libtorch.
pub(crate) fn cuda_tools(workspace: &Workspace) -> Result<CudaTools> {
    cuda_tools::ensure(workspace, workspace.pair()?)
}

/// Makes sure that `.libtorch` leads to a libtorch that the locked `tch` can be built against, and prints a line about it.
pub(crate) fn ensure(workspace: &Workspace, wanted: Option<Variant>) -> Result<Torch> {
    let start = Instant::now();
    let (torch, from) = find(workspace, workspace.pair()?, wanted)?;
    put_in_place(workspace, torch, from, start)
}

/// Makes `pair` the one that is built: its libtorch, then its `tch` in `Cargo.lock`, then the link. A failure
/// leaves the lock and the link as they were.
fn switch(workspace: &Workspace, pair: &Pair, wanted: Option<Variant>) -> Result<()> {
    let start = Instant::now();
    let (torch, from) = find(workspace, pair, wanted)?;
    // A switch repairs a lock with an unknown version.
    let locked = workspace.pair().ok() == Some(pair);
    if !locked {
        cargo::lock_tch(workspace, pair)?;
    }
    put_in_place(workspace, torch, from, start)?;
    if locked {
        eprintln!("setup: Cargo.lock already has tch {} for torch {}", pair.tch, pair.torch);
        return Ok(());
    }
    eprintln!(
        "setup: Cargo.lock has tch {} for torch {} from here on; the next build compiles tch, torch-sys and what links \
         libtorch for it, each profile once: {}. What target/ holds for another version stays there for a switch back",
        pair.tch,
        pair.torch,
        cargo::packages_with_torch(workspace)?.join(", ")
    );
    Ok(())
}

/// Returns the libtorch of `pair` and its origin; installs it if it is missing.
fn find(workspace: &Workspace, pair: &Pair, wanted: Option<Variant>) -> Result<(Torch, &'static str)> {
    compiler::check(|name| std::env::var_os(name))?;
    let environment = Environment::of_this_process(workspace);
    let (decision, notes) = decide(&environment, pair, wanted)?;
    for note in notes {
        eprintln!("setup: {note}");
    }
    Ok(match decision {
        Decision::Keep(torch) => (torch, "linked already"),
        Decision::Link(torch, from) => (torch, from),
        Decision::Install(variant) => (install(pair, variant)?, "private environment"),
    })
}

/// Links `torch` and prints a line about it.
fn put_in_place(workspace: &Workspace, torch: Torch, from: &str, start: Instant) -> Result<Torch> {
    link(&workspace.libtorch(), &torch.folder)?;
    eprintln!(
        "setup: libtorch {} ({}) in {}, linked as .libtorch ({from}, {:.1} s)",
        torch.version,
        torch.variant,
        torch.folder.display(),
        start.elapsed().as_secs_f64(),
    );
    Ok(torch)
}

/// Installs the wheels into a private environment and returns its libtorch.
fn install(pair: &Pair, variant: Variant) -> Result<Torch> {
    let recipe = recipe(pair, variant);
    let venv = venv::ensure(&cache_folder()?, &recipe, |folder| is_whole(folder, pair, variant))?;
    if let Some(time) = venv.made_in {
        eprintln!("setup: installed {} in {:.1} s", recipe.what, time.as_secs_f64());
    }
    Torch::inspect(&venv.torch()?)
}

/// Without CUDA three wheels are enough, at a quarter of the size: libtorch loads the profiler's and the runtime's
/// library at start, and the other packages only when a GPU is used.
fn recipe(pair: &Pair, variant: Variant) -> Recipe {
    let torch = pair.torch;
    let mut packages = vec![format!("torch=={torch}")];
    if variant == Variant::Cpu {
        packages.insert(0, "--no-deps".into());
        if cfg!(target_os = "linux") {
            packages.extend(pair.slim.map(|(package, version)| format!("{package}=={version}")));
        }
    }
    Recipe {
        name: format!("torch-{torch}-{}", variant.lower()),
        what: format!("torch {torch} ({variant})"),
        torch: torch.into(),
        size: if variant == Variant::Cpu { "1.3 GB" } else { "4.7 GB" },
        fingerprint: packages.join(" "),
        packages,
    }
}

/// Whether the environment in `folder` has all that libtorch needs.
fn is_whole(folder: &Path, pair: &Pair, variant: Variant) -> bool {
    let Some(torch) = venv::site_packages(folder).map(|site| site.join("torch")) else { return false };
    let fits = Torch::inspect(&torch).is_ok_and(|torch| {
        torch.fits(pair) && (torch.variant == variant || variant == Variant::Cpu || cfg!(target_os = "macos"))
    });
    let slim = pair.slim.map(|(package, _)| package.replace('-', "_"));
    let nvidia: &[String] = if cfg!(target_os = "linux") { &slim } else { &[] };
    let wheels: Vec<&str> = std::iter::once("torch").chain(nvidia.iter().map(String::as_str)).collect();
    fits && venv::wheels_complete(folder, &wheels)
}

/// Makes `link` lead to `folder`, by way of a rename so that it is never missing.
fn link(link: &Path, folder: &Path) -> Result<()> {
    let is_link = link.symlink_metadata().is_ok_and(|file| file.is_symlink());
    if !is_link && link.exists() {
        if link.canonicalize().ok() == folder.canonicalize().ok() {
            return Ok(());
        }
        bail!("{} is not a link; move it away and run this again", link.display());
    }
    if is_link && std::fs::read_link(link).is_ok_and(|target| target == folder) {
        return Ok(());
    }
    let new = link.with_extension(std::process::id().to_string());
    let _ = std::fs::remove_file(&new);
    std::os::unix::fs::symlink(folder, &new)
        .and_then(|()| std::fs::rename(&new, link))
        .with_context(|| format!("cannot make the link {}", link.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_recipe_is_three_wheels() {
        for version in ["2.11.0", "2.13.0"] {
            let recipe = recipe(Pair::of_torch(version).unwrap(), Variant::Cpu);
            assert_eq!(recipe.name, format!("torch-{version}-cpu"));
            assert_eq!(
                recipe.fingerprint,
                format!("--no-deps torch=={version} nvidia-cuda-cupti==13.0.* nvidia-cuda-runtime==13.0.*")
            );
        }
    }

    #[test]
    fn a_link_is_made_moved_and_repaired() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b, at) = (dir.path().join("a"), dir.path().join("b"), dir.path().join(".libtorch"));
        std::fs::create_dir(&a).unwrap();
        std::fs::create_dir(&b).unwrap();
        for target in [&a, &a, &b] {
            link(&at, target).unwrap();
            assert_eq!(&std::fs::read_link(&at).unwrap(), target);
        }
        std::fs::remove_dir(&b).unwrap();
        link(&at, &a).unwrap();
        assert_eq!(std::fs::read_link(&at).unwrap(), a, "a dangling link is replaced");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "nothing is left over");
    }

    #[test]
    fn a_folder_in_the_place_of_the_link_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join(".libtorch");
        std::fs::create_dir(&at).unwrap();
        assert!(link(&at, dir.path()).unwrap_err().to_string().contains("is not a link"));
        assert!(link(&at, &at).is_ok());
    }
}
