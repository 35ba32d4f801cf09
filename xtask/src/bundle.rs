//! `cargo xtask bundle`: one archive for a machine that has torch and no Rust.

mod archive;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use report::Specs;
use serde::Deserialize;

use crate::cargo::{self, Executable};
use crate::house::{BundledTest, House, MANIFEST, Manifest};
use crate::programs::packages;
use crate::torch::TORCH_VERSION;
use crate::{revision, setup};
use archive::Entry;

/// What travels well. More than this, and something has slipped in that does not belong.
const LIMIT: u64 = 50 << 20;

/// Finds libtorch through the target's Python, then starts `xtask`.
const SCRIPT: &str = include_str!("bundle/run.sh");

/// Where the archive goes.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The archive, instead of .bundle/frugal-bundle.tar.gz
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(crate) fn run(house: &House, args: &Args) -> Result<()> {
    house.need_sources("bundle")?;
    let start = Instant::now();
    let specs = Specs::load(&house.root)?;
    setup::ensure(house, None)?;
    let experiments = specs.experiments.iter().map(|e| &*e.package);
    let mut wanted = packages(experiments.chain(specs.comparisons.iter().map(|c| &*c.package)));
    wanted.push("xtask".into());
    let programs = cargo::build_programs(house, &wanted)?;
    let tests = tests(house)?;

    let mut entries = Vec::new();
    let mut manifest =
        Manifest { revision: revision::current(house), torch: TORCH_VERSION.into(), ..Manifest::default() };
    for (name, path) in programs {
        let place = Path::new("bin").join(&name);
        entries.push(Entry::program(&place, path));
        if name != "xtask" {
            manifest.programs.insert(name, place);
        }
    }
    for test in tests {
        let place = Path::new("tests").join(format!("{}-{}", test.package, test.name));
        entries.push(Entry::program(&place, test.path));
        manifest.tests.push(BundledTest { package: test.package, name: test.name, path: place });
    }
    let text = serde_json::to_string_pretty(&manifest).context("a manifest is plain data")?;
    entries.push(Entry::text(&Path::new("bin").join(MANIFEST), text, false));
    entries.push(Entry::text(Path::new("run.sh"), SCRIPT.into(), true));
    let shared = archive::shared_files(&house.root)?;
    entries.extend(shared.into_iter().map(|file| Entry::file(&file, house.root.join(&file))));
    archive::check_listing(&entries)?;

    let own = house.root.join(".bundle/frugal-bundle.tar.gz");
    let out = match &args.out {
        Some(out) => out,
        None => {
            std::fs::create_dir_all(own.parent().unwrap_or(&house.root)).context("cannot create .bundle")?;
            &own
        }
    };
    let size = archive::write(out, entries)?;
    if size > LIMIT {
        bail!(
            "{} is {:.1} MiB, and a bundle has at most {} MiB; it was left there to look into with tar -tvzf",
            out.display(),
            mib(size),
            LIMIT >> 20
        );
    }
    println!(
        "bundle: {} ({:.1} MiB, {} programs, {} tests, revision {}, {:.0} s); on a machine with torch {TORCH_VERSION}: \
         tar -xzf it, then ./{}/run.sh test",
        out.display(),
        mib(size),
        manifest.programs.len(),
        manifest.tests.len(),
        manifest.revision,
        start.elapsed().as_secs_f64(),
        archive::TOP,
    );
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The release tests of the packages that link libtorch: the others have nothing to learn from another machine.
fn tests(house: &House) -> Result<Vec<Executable>> {
    let packages = packages_with_torch(house)?;
    if packages.is_empty() {
        return Ok(Vec::new());
    }
    let mut args = vec!["test", "--release", "--no-run"];
    args.extend(packages.iter().flat_map(|package| ["--package", package]));
    let mut tests: Vec<Executable> =
        cargo::executables(house, &args)?.into_iter().filter(|e| e.test).collect();
    tests.sort_by(|a, b| (&a.package, &a.name).cmp(&(&b.package, &b.name)));
    Ok(tests)
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
}

fn packages_with_torch(house: &House) -> Result<Vec<String>> {
    let mut command: Command = cargo::command(house);
    let output = command.args(["metadata", "--no-deps", "--offline", "--format-version", "1"]).output();
    let output = output.context("cannot run cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let metadata: Metadata = serde_json::from_slice(&output.stdout).context("cargo metadata gave no JSON")?;
    Ok(linking_torch(&metadata.packages))
}

/// Those that depend on `tch`, directly or through another package of the workspace.
fn linking_torch(packages: &[Package]) -> Vec<String> {
    let mut linking: Vec<String> = vec!["tch".into(), "torch-sys".into()];
    loop {
        let links = |package: &&Package| {
            !linking.contains(&package.name) && package.dependencies.iter().any(|d| linking.contains(&d.name))
        };
        match packages.iter().find(links) {
            Some(package) => linking.push(package.name.clone()),
            None => return linking.split_off(2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_with_torch_are_found_through_others() {
        let package = |name: &str, dependencies: &[&str]| Package {
            name: name.into(),
            dependencies: dependencies.iter().map(|&name| Dependency { name: name.into() }).collect(),
        };
        let all = [
            package("lora", &["runtime", "report"]),
            package("report", &["serde"]),
            package("runtime", &["tch"]),
            package("xtask", &["report"]),
        ];
        assert_eq!(linking_torch(&all), ["runtime", "lora"]);
    }

    #[test]
    fn the_script_asks_for_the_torch_that_the_programs_link() {
        let series = TORCH_VERSION.rsplit_once('.').map(|(series, _)| series).unwrap();
        assert!(SCRIPT.contains(&format!("{series}.*)")), "run.sh checks for another torch than {series}");
    }
}
