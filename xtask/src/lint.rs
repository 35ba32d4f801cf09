//! `cargo xtask lint`: formatting, lints, documentation.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::house::House;
use crate::{cargo, setup};

pub(crate) fn run(house: &House) -> Result<()> {
    house.need_sources("lint")?;
    // Clippy and rustdoc check the crates that link libtorch too, and their build scripts need it.
    setup::ensure(house, None)?;
    let documentation_flags = format!("{} -D warnings", std::env::var("RUSTDOCFLAGS").unwrap_or_default());
    let checks: [(&str, &[&str]); 5] = [
        ("formatting", &["fmt", "--all", "--check"]),
        ("lints", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
        // A technique's library stands without what its program composes.
        (
            "library alone",
            &["clippy", "-p", "lora", "--lib", "--no-default-features", "--", "-D", "warnings"],
        ),
        (
            "library alone",
            &["clippy", "-p", "offload", "--lib", "--no-default-features", "--", "-D", "warnings"],
        ),
        ("documentation", &["doc", "--workspace", "--no-deps"]),
    ];
    let mut failed = Vec::new();
    for (what, args) in checks {
        eprintln!("lint: cargo {}", args.join(" "));
        let mut command: Command = cargo::command(house);
        command.args(args).env("RUSTDOCFLAGS", documentation_flags.trim());
        if !command.status().context("cannot run cargo")?.success() {
            failed.push(what);
        }
    }
    match failed.as_slice() {
        [] => {
            println!("lint: formatting, lints and documentation are clean");
            Ok(())
        }
        failed => {
            bail!("not clean: {}; `cargo fmt` repairs formatting, the rest is named above", failed.join(", "))
        }
    }
}
