//! `cargo xtask lint`: formatting, lints, documentation, licences.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;
use crate::{cargo, dependencies, setup};

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    workspace.need_sources("lint")?;
    // Clippy and rustdoc check the crates that link libtorch too, and their build scripts need it.
    setup::ensure(workspace, None)?;
    let documentation_flags = format!("{} -D warnings", std::env::var("RUSTDOCFLAGS").unwrap_or_default());
    let checks: [(&str, &[&str]); 3] = [
        ("formatting", &["fmt", "--all", "--check"]),
        ("lints", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
        ("documentation", &["doc", "--workspace", "--no-deps"]),
    ];
    let mut failed = Vec::new();
    for (what, args) in checks {
        eprintln!("lint: cargo {}", args.join(" "));
        let mut command: Command = cargo::command(workspace);
        command.args(args).env("RUSTDOCFLAGS", documentation_flags.trim());
        if !command.status().context("cannot run cargo")?.success() {
            failed.push(what);
        }
    }
    if let Err(error) = dependencies::check_licences(workspace) {
        eprintln!("lint: {error:#}");
        failed.push("licences");
    }
    if !other_architecture(workspace)? {
        failed.push("another architecture");
    }
    match failed.as_slice() {
        [] => {
            println!("lint: formatting, lints, documentation and licences are clean");
            Ok(())
        }
        failed => {
            bail!(
                "not clean: {}; `cargo fmt` fixes formatting, the other errors are above",
                failed.join(", ")
            )
        }
    }
}

/// An architecture that shares no vector instructions with x86-64.
const OTHER: &str = "aarch64-unknown-linux-gnu";

/// Checks that what needs no libtorch, and the kernels in Rust, compile for another architecture. Where its standard library
/// cannot be installed, prints that the check is skipped.
fn other_architecture(workspace: &Workspace) -> Result<bool> {
    let installed = Command::new("rustup").args(["target", "add", OTHER]).output();
    if !installed.is_ok_and(|output| output.status.success()) {
        println!("skipped: the check for {OTHER}, because `rustup target add {OTHER}` fails here");
        return Ok(true);
    }
    let checks: [&[&str]; 2] = [
        &["--package", "report", "--package", "accounting", "--package", "ptx", "--package", "xtask"],
        &["--package", "kernels", "--features", "check-only"],
    ];
    let mut clean = true;
    for packages in checks {
        let args = [&["check", "--target", OTHER], packages].concat();
        eprintln!("lint: cargo {}", args.join(" "));
        let mut command = cargo::command(workspace);
        // Libraries in C are compiled for this machine: nothing is linked, and no cross compiler is asked for.
        command
            .args(args)
            .env(format!("CC_{}", OTHER.replace('-', "_")), "cc")
            .env("RUSTFLAGS", "-D warnings");
        clean &= command.status().context("cannot run cargo")?.success();
    }
    Ok(clean)
}
