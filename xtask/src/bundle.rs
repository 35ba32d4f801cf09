//! `cargo xtask bundle`: one archive for a machine that has torch and no Rust.

mod archive;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use report::Specs;

use crate::archive::{Entry, check_listing};
use crate::cargo::{self, Executable, Optimization};
use crate::programs::packages;
use crate::torch::Pair;
use crate::workspace::{BundledTest, MANIFEST, Manifest, Workspace};
use crate::{revision, setup};

/// Limit of the archive, so that it is copied quickly to a GPU that is rented by the minute: a larger one contains files that do not
/// belong in it.
const LIMIT: u64 = 27 << 20;

/// Finds libtorch through the target's Python, then starts `xtask`. It contains [`SERIES`] in place of the version.
const SCRIPT: &str = include_str!("bundle/run.sh");

/// In [`SCRIPT`], torch's version without the patch.
const SERIES: &str = "@TORCH_SERIES@";

/// Arguments of `cargo xtask bundle`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Path of the archive [default: .bundle/frugal-bundle.tar.xz]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    workspace.need_sources("bundle")?;
    let start = Instant::now();
    let specs = Specs::load(&workspace.root)?;
    let pair = workspace.pair()?;
    setup::ensure(workspace, None)?;
    let experiments = specs.experiments.iter().map(|e| &*e.package);
    let comparisons = specs.comparisons.iter().map(|c| &*c.package);
    // The product measures nothing by itself; its tests run it.
    let mut wanted = packages(experiments.chain(comparisons).chain(["frugal-cli"]));
    wanted.push("xtask".into());
    let programs = cargo::build_programs(workspace, &wanted, Optimization::Release)?;
    let tests = tests(workspace)?;

    let mut entries = Vec::new();
    let mut manifest =
        Manifest { revision: revision::current(workspace), torch: pair.torch.into(), ..Manifest::default() };
    for (name, path) in programs {
        // The binary of `frugal-cli` is `frugal`.
        let place = Path::new("bin").join(path.file_name().context("a program has a name")?);
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
    entries.push(Entry::text(Path::new("run.sh"), script(pair), true));
    entries.extend(archive::shared_files(&workspace.root)?);
    check_listing(&entries)?;

    let default = workspace.root.join(".bundle/frugal-bundle.tar.xz");
    let out = args.out.as_ref().unwrap_or(&default);
    let size = archive::write(out, &entries)?;
    check_size(out, size)?;
    println!(
        "bundle: {} ({:.1} MiB, {} programs, {} tests, revision {}, {:.0} s); on a machine with torch {}: \
         tar -xJf it (or python3 -m tarfile -e), then ./{}/run.sh test",
        out.display(),
        mib(size),
        manifest.programs.len(),
        manifest.tests.len(),
        manifest.revision,
        start.elapsed().as_secs_f64(),
        pair.torch,
        archive::TOP,
    );
    Ok(())
}

/// Refuses an archive above [`LIMIT`].
fn check_size(archive: &Path, bytes: u64) -> Result<()> {
    if bytes <= LIMIT {
        return Ok(());
    }
    bail!(
        "{} is {:.1} MiB, more than the limit of {} MiB; inspect it with tar -tvJf",
        archive.display(),
        mib(bytes),
        LIMIT >> 20
    )
}

/// The script of a bundle whose programs link the libtorch of `pair`.
fn script(pair: &Pair) -> String {
    SCRIPT.replace(SERIES, pair.series())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The packages whose tests a GPU decides: kernels, streams and graphs, what is built on them, and groups over NCCL.
const TESTED: [&str; 6] = ["runtime", "kernels", "lora", "offload", "training", "sharding"];

/// The release tests of [`TESTED`].
fn tests(workspace: &Workspace) -> Result<Vec<Executable>> {
    let mut args = vec!["test", "--release", "--no-run", "--tests"];
    args.extend(TESTED.iter().flat_map(|package| ["--package", package]));
    let mut tests: Vec<Executable> =
        cargo::executables(workspace, &args)?.into_iter().filter(|e| e.test).collect();
    tests.sort_by(|a, b| (&a.package, &a.name).cmp(&(&b.package, &b.name)));
    Ok(tests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_above_the_limit_is_refused() {
        let archive = Path::new("bundle.tar.xz");
        check_size(archive, 27 << 20).unwrap();
        assert_eq!(
            check_size(archive, (27 << 20) + (1 << 19)).unwrap_err().to_string(),
            "bundle.tar.xz is 27.5 MiB, more than the limit of 27 MiB; inspect it with tar -tvJf"
        );
    }

    #[test]
    fn the_script_asks_for_the_torch_that_the_programs_link() {
        for series in ["2.11", "2.13"] {
            let script = script(Pair::of_torch(series).unwrap());
            assert!(script.contains(&format!("\n    {series}.*) ;;\n")), "{script}");
            assert_eq!(script.matches(&format!("torch {series}")).count(), 2, "{script}");
            assert!(!script.contains(SERIES), "{script}");
        }
    }
}
