//! `cargo xtask release`: what people install who have no Rust.
//!
//! | file | for |
//! |---|---|
//! | `frugal_train-….whl` | a machine with Python: `pip install` puts the program beside torch, whose libraries it computes with |
//! | `frugal-…-cpu.tar.zst` | a machine without Python: the program and the CPU's libtorch |
//! | `frugal-….cdx.json` | the linked packages with licences and checksums (CycloneDX); both others contain it |
//! | `SHA256SUMS` | the digests of all |
//!
//! Both contain the data sets of `--data embedded`, manual pages and completions for shells.

mod elf;
mod platform;
mod program;
mod tarball;
mod wheel;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::archive::{self, Entry};
use crate::workspace::Workspace;
use crate::{cargo, dependencies, setup};
use program::{Glibc, Program};
use tarball::Effort;

/// Arguments of `cargo xtask release`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder for the files
    #[arg(long, value_name = "FOLDER", default_value = "dist")]
    out: PathBuf,
    /// The oldest glibc that the program runs with: 2.28 is torch's own; host is this machine's, and needs no other linker
    #[arg(long, value_name = "VERSION", default_value = "2.28", conflicts_with = "program")]
    glibc: Glibc,
    /// Pack this program instead of building one: quick, for trying the files; it may hold paths of the machine that built it
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Make the wheel alone
    #[arg(long)]
    wheel: bool,
}

/// What the wheel and the archive contain. Places are relative to the folder that each kind has.
struct Parts {
    /// The program's file.
    program: PathBuf,
    /// The data sets of `--data embedded`, in `data`.
    data: Vec<Entry>,
    /// The project's licences.
    licences: Vec<Entry>,
    /// Manual pages and completions, in the folders that are below `share` on Unix.
    manual: Vec<Entry>,
    /// The linked packages, in CycloneDX's format.
    components: String,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    workspace.need_sources("release")?;
    ensure!(
        cfg!(all(target_os = "linux", target_arch = "x86_64")),
        "releases are made on Linux on x86-64; on another machine, build with `cargo install --path crates/frugal-cli`"
    );
    let pair = workspace.pair()?;
    let torch = setup::ensure(workspace, None)?;
    let scratch = tempfile::tempdir().context("cannot make a temporary folder")?;
    let program = match &args.program {
        Some(path) => Program::read(path)?,
        None => Program::build(workspace, &torch, pair, args.glibc)?,
    };
    let path = scratch.path().join("frugal");
    files::atomic_write::unsynced(&path, &program.bytes)?;
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let parts = Parts {
        data: data(workspace)?,
        licences: ["LICENSE-APACHE", "LICENSE-MIT"]
            .map(|name| Entry::file(Path::new(name), workspace.root.join(name)))
            .into(),
        manual: manual(workspace, &path)?,
        components: dependencies::document(workspace)?,
        program: path,
    };

    let mut names = vec![wheel::file_name(pair, program.glibc)];
    let start = Instant::now();
    let size = wheel::write(&args.out.join(&names[0]), &parts, pair, program.glibc)?;
    say(&args.out.join(&names[0]), size, start);
    if !args.wheel {
        let name = format!("{}.tar.zst", tarball::name());
        let start = Instant::now();
        let effort = if args.program.is_some() { Effort::Low } else { Effort::High };
        let size = tarball::write(&args.out.join(&name), &parts, &torch, scratch.path(), effort)?;
        say(&args.out.join(&name), size, start);
        names.push(name);
        let name = format!("frugal-{}.cdx.json", env!("CARGO_PKG_VERSION"));
        files::atomic_write::unsynced(&args.out.join(&name), parts.components.as_bytes())?;
        names.push(name);
    }
    let mut sums = String::new();
    for name in &names {
        let bytes = std::fs::read(args.out.join(name))?;
        let digest = archive::hex(&Sha256::digest(&bytes));
        sums += &format!("{digest}  {name}\n");
    }
    files::atomic_write::unsynced(&args.out.join("SHA256SUMS"), sums.as_bytes())?;
    println!("release: for glibc 2.{} or newer, with torch {}", program.glibc, pair.torch);
    Ok(())
}

fn say(path: &Path, bytes: u64, start: Instant) {
    println!(
        "release: {} ({:.1} MB, {:.0} s)",
        path.display(),
        bytes as f64 / 1e6,
        start.elapsed().as_secs_f64()
    );
}

/// The data sets of `--data embedded`.
fn data(workspace: &Workspace) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    archive::walk(&workspace.root.join("data"), Path::new("data"), &mut entries)?;
    entries.retain(|entry| {
        !["data/fixtures", "data/real_models"].iter().any(|folder| entry.place.starts_with(folder))
    });
    Ok(entries)
}

/// The manual pages and completions, which the program itself writes.
fn manual(workspace: &Workspace, program: &Path) -> Result<Vec<Entry>> {
    let run = |words: &[&std::ffi::OsStr]| -> Result<String> {
        let mut command = Command::new(program);
        cargo::with_libtorch(&mut command, workspace);
        let output =
            command.args(words).output().with_context(|| format!("cannot run {}", program.display()))?;
        ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    };
    let pages = tempfile::tempdir().context("cannot make a temporary folder")?;
    run(&["man".as_ref(), pages.path().as_os_str()])?;
    let mut entries = Vec::new();
    archive::walk(pages.path(), Path::new("man/man1"), &mut entries)?;
    // The folder is removed before they are packed.
    for entry in &mut entries {
        *entry = Entry::text(&entry.place, String::from_utf8(entry.bytes()?)?, false);
    }
    for (shell, place) in [
        ("bash", "bash-completion/completions/frugal"),
        ("fish", "fish/vendor_completions.d/frugal.fish"),
        ("zsh", "zsh/site-functions/_frugal"),
    ] {
        let script = run(&["completions".as_ref(), shell.as_ref()])?;
        entries.push(Entry::text(Path::new(place), script, false));
    }
    Ok(entries)
}
