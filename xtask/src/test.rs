//! `cargo xtask test`: sets up, then runs every test; in a bundle, the prebuilt ones.

mod output;

use std::io::{BufRead, BufReader};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};

use crate::house::{House, Manifest};
use crate::{cargo, setup};
use output::Filter;

/// What to pass on.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Arguments for `cargo test`, for example `-- -p runtime`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "CARGO ARGS")]
    extra: Vec<String>,
}

pub(crate) fn run(house: &House, args: &Args) -> Result<()> {
    let mut filter = Filter::default();
    let failed = match &house.bundle {
        None => {
            setup::ensure(house, None)?;
            let args = cargo_args(&args.extra);
            eprintln!("test: cargo {}", args.join(" "));
            let mut command = cargo::command(house);
            command.args(&args);
            // Tests start in their package's folder, where a relative path would mean something else.
            if let Some(fixtures) = std::env::var_os("FRUGAL_FIXTURES").filter(|path| !path.is_empty()) {
                command.env(
                    "FRUGAL_FIXTURES",
                    std::path::absolute(fixtures).context("FRUGAL_FIXTURES is no path")?,
                );
            }
            (!run_filtered(command, &mut filter)?.success())
                .then(|| "cargo test did not succeed; what failed is named above".to_owned())
        }
        Some(bundle) => run_bundled(house, bundle, &args.extra, &mut filter)?,
    };
    let skipped = filter.skipped();
    if !skipped.is_empty() {
        println!("\n{} skipped:", count(skipped.len(), "test was", "tests were"));
        skipped.iter().for_each(|line| println!("    {line}"));
    }
    println!("{} passed, {} failed", filter.passed, filter.failed);
    match failed {
        None => Ok(()),
        Some(message) => bail!(message),
    }
}

fn count(n: usize, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

/// The whole workspace unless packages are named; output of passing tests is asked for, since that is where they say
/// what they skipped.
fn cargo_args(extra: &[String]) -> Vec<String> {
    let (cargo, harness) = match extra.iter().position(|arg| arg == "--") {
        Some(at) => (&extra[..at], &extra[at + 1..]),
        None => (extra, &[][..]),
    };
    let names_packages = cargo
        .iter()
        .any(|arg| ["-p", "--package", "--workspace"].contains(&&**arg) || arg.starts_with("--package="));
    let mut args = vec!["test".to_owned()];
    if !names_packages {
        args.push("--workspace".into());
    }
    args.push("--no-fail-fast".into());
    args.extend_from_slice(cargo);
    args.extend(["--".to_owned(), "--show-output".to_owned()]);
    args.extend_from_slice(harness);
    args
}

/// Prints what a person wants to see of a test run, and keeps what was skipped.
fn run_filtered(mut command: Command, filter: &mut Filter) -> Result<ExitStatus> {
    let mut child = command.stdout(Stdio::piped()).spawn().context("cannot run the tests")?;
    let output = child.stdout.take().expect("standard output is piped");
    for line in BufReader::new(output).split(b'\n') {
        let line = line.context("cannot read the tests' output")?;
        if let Some(line) = filter.line(&String::from_utf8_lossy(&line)) {
            println!("{line}");
        }
    }
    child.wait().context("cannot wait for the tests")
}

/// Runs the prebuilt tests as cargo would: each in its package's folder.
fn run_bundled(
    house: &House,
    bundle: &Manifest,
    extra: &[String],
    filter: &mut Filter,
) -> Result<Option<String>> {
    let mut failed = Vec::new();
    for test in &bundle.tests {
        let folder = house.root.join("crates").join(&test.package);
        let mut command = Command::new(house.root.join(&test.path));
        command.current_dir(&folder).env("CARGO_MANIFEST_DIR", &folder).arg("--show-output");
        if std::env::var_os("FRUGAL_FIXTURES").is_none() {
            command.env("FRUGAL_FIXTURES", house.root.join("data/fixtures"));
        }
        for (name, path) in &bundle.programs {
            command.env(format!("CARGO_BIN_EXE_{name}"), house.root.join(path));
        }
        command.args(extra.iter().filter(|arg| *arg != "--"));
        println!("\n     Running {} of {}", test.name, test.package);
        if !run_filtered(command, filter)?.success() {
            failed.push(format!("{} of {}", test.name, test.package));
        }
    }
    Ok((!failed.is_empty()).then(|| format!("failed: {}", failed.join(", "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extra_arguments_go_to_cargo_and_after_the_second_dash_to_the_tests() {
        let check = |extra: &str, expected: &str| {
            let extra: Vec<String> = extra.split_whitespace().map(str::to_owned).collect();
            assert_eq!(cargo_args(&extra).join(" "), expected);
        };
        check("", "test --workspace --no-fail-fast -- --show-output");
        check("--release", "test --workspace --no-fail-fast --release -- --show-output");
        check("-p amp", "test --no-fail-fast -p amp -- --show-output");
        check("-p amp -- scaler", "test --no-fail-fast -p amp -- --show-output scaler");
    }
}
