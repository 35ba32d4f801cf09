//! The archive: the program with the CPU's libtorch, for machines without Python.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::Parts;
use super::elf;
use crate::archive::{self, Entry};
use crate::torch::Torch;

/// Sizes of what zstd looks back at: 128 MiB, the most that `zstd` unpacks without a flag.
const WINDOW_LOG: u32 = 27;

/// The name of the folder that it unpacks to, and of the file without its extension.
pub(super) fn name() -> String {
    format!("frugal-{}-linux-{}-cpu", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH)
}

/// How much time is spent on a smaller file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effort {
    /// Seconds.
    Low,
    /// Minutes.
    High,
}

/// Writes the archive into `out` and returns its size in bytes. Symbols that no library refers to are taken off in `scratch`.
///
/// # Errors
/// A library that libtorch needs and that is neither beside it nor glibc's or GCC's; a failed `strip`; a full disk.
pub(super) fn write(out: &Path, parts: &Parts, torch: &Torch, scratch: &Path, effort: Effort) -> Result<u64> {
    let mut entries = vec![
        Entry::program(Path::new("bin/frugal"), parts.program.clone()),
        Entry::text(Path::new("frugal.cdx.json"), parts.components.clone(), false),
    ];
    for path in libraries(torch)? {
        let name = path.file_name().context("a library has a name")?;
        let stripped = scratch.join(name);
        let status =
            Command::new("strip").arg("--strip-unneeded").arg("-o").args([&stripped, &path]).status();
        ensure!(status.context("cannot run strip")?.success(), "strip failed on {}", path.display());
        entries.push(Entry::program(&Path::new("lib").join(name), stripped));
    }
    entries.extend(licences(torch)?);
    entries.extend(parts.data.iter().cloned());
    entries.extend(parts.licences.iter().cloned());
    entries.extend(parts.manual.iter().map(|entry| entry.below(Path::new("share"))));
    archive::check_listing(&entries)?;
    archive::write(out, |file| {
        let level = if effort == Effort::High { 19 } else { 3 };
        let mut encoder = zstd::Encoder::new(file, level)?;
        encoder.long_distance_matching(true)?;
        encoder.window_log(WINDOW_LOG)?;
        Ok(archive::tar(encoder, &name(), 0, &entries)?.finish()?)
    })
}

/// The environment's folders with the libraries that torch's wheel requires.
fn nvidia(torch: &Torch) -> Vec<PathBuf> {
    let site = torch.folder.canonicalize().ok().and_then(|folder| folder.parent().map(Path::to_owned));
    let packages = site.and_then(|site| std::fs::read_dir(site.join("nvidia")).ok());
    packages.into_iter().flatten().flatten().map(|package| package.path().join("lib")).collect()
}

/// libtorch's CPU library and all that it needs, beside what every Linux has.
fn libraries(torch: &Torch) -> Result<Vec<PathBuf>> {
    let mut folders = vec![torch.folder.join("lib")];
    folders.extend(nvidia(torch));
    let find = |name: &str| folders.iter().map(|folder| folder.join(name)).find(|path| path.exists());
    let (mut known, mut found) = (BTreeSet::new(), Vec::new());
    let mut open = vec!["libtorch_cpu.so".to_owned()];
    while let Some(name) = open.pop() {
        if !known.insert(name.clone()) {
            continue;
        }
        let Some(path) = find(&name) else {
            ensure!(
                super::platform::of_the_system(&name),
                "libtorch needs {name}, which is not beside it; run `cargo xtask setup --cpu`"
            );
            continue;
        };
        open.extend(elf::needs(&std::fs::read(&path)?)?.libraries);
        found.push(path);
    }
    found.sort();
    Ok(found)
}

/// The licences of the packages that the libraries come from.
fn licences(torch: &Torch) -> Result<Vec<Entry>> {
    let site = torch.folder.canonicalize()?;
    let site = site.parent().context("libtorch has a folder")?;
    let mut entries = Vec::new();
    for package in std::fs::read_dir(site)?.flatten() {
        let name = package.file_name().to_string_lossy().into_owned();
        let Some((distribution, _)) = name.split_once('-').filter(|_| name.ends_with(".dist-info")) else {
            continue;
        };
        if distribution == "torch" || distribution.starts_with("nvidia") {
            let place = Path::new("licenses").join(distribution);
            archive::walk(&package.path().join("licenses"), &place, &mut entries)?;
        }
    }
    ensure!(!entries.is_empty(), "{} has no licence of torch; run `cargo xtask setup --cpu`", site.display());
    entries.sort_by(|a, b| a.place.cmp(&b.place));
    Ok(entries)
}
