//! `cargo xtask test`: sets up, then runs every test; in a bundle, the prebuilt ones.
//!
//! The whole workspace is built at once and its test executables run beside each other, one for each processor and the first ones
//! while the last are built. Those whose results depend on matrix products and vector kernels run again under each other
//! implementation ([`choices`]). The documentation's examples are compiled and run beside them. With arguments it is `cargo test`
//! with these.

mod choices;
mod jobs;
mod linked;
mod output;

use std::io::{BufRead, BufReader};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};

use crate::cargo::Executable;
use crate::workspace::{Manifest, Workspace};
use crate::{cargo, setup};
use choices::CHOICES;
use jobs::Job;
use linked::Linked;
use output::Filter;

/// The arguments of `cargo test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Arguments for `cargo test`, for example `-- -p runtime`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "CARGO ARGS")]
    extra: Vec<String>,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let mut filter = Filter::default();
    let failed = match &workspace.bundle {
        None => {
            setup::ensure(workspace, None)?;
            if args.extra.is_empty() {
                run_workspace(workspace, &mut filter)?
            } else {
                let args = cargo_args(&args.extra);
                eprintln!("test: cargo {}", args.join(" "));
                let mut command = cargo::command(workspace);
                command.args(&args);
                with_fixtures(&mut command)?;
                (!run_filtered(command, &mut filter)?.success())
                    .then(|| "cargo test failed; its failures are listed above".to_owned())
            }
        }
        Some(bundle) => run_bundled(workspace, bundle, &args.extra, &mut filter)?,
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

/// Makes `FRUGAL_FIXTURES` absolute: tests start in their package's folder.
fn with_fixtures(command: &mut Command) -> Result<()> {
    if let Some(fixtures) = std::env::var_os("FRUGAL_FIXTURES").filter(|path| !path.is_empty()) {
        command.env(
            "FRUGAL_FIXTURES",
            std::path::absolute(fixtures).context("FRUGAL_FIXTURES is not a usable path")?,
        );
    }
    Ok(())
}

/// Runs the tests while the workspace is built, each executable as soon as it is linked.
fn run_workspace(workspace: &Workspace, filter: &mut Filter) -> Result<Option<String>> {
    let mut fixtures = Command::new("true");
    with_fixtures(&mut fixtures)?;
    let prepare = |command: &mut Command| {
        cargo::with_libtorch(command, workspace);
        command.envs(fixtures.get_envs().filter_map(|(name, value)| Some((name, value?))));
    };
    let flags = choices::processor_flags();
    let mut linked = Linked::new(cargo::packages_with_programs(workspace)?);
    let failed = jobs::run(
        slots(),
        filter,
        |line| println!("{line}"),
        |queue| {
            let start = |tests: Vec<Executable>| {
                let jobs = tests.iter().flat_map(|test| plan(workspace, test, &flags, &prepare));
                jobs.for_each(|job| queue.push(job));
            };
            // `--tests` links no examples; the tests that include an example compile it.
            cargo::build(workspace, &["test", "--workspace", "--tests", "--no-run"], |executable| {
                start(linked.runnable(executable));
            })?;
            start(linked.rest());
            let mut command = cargo::command(workspace);
            command.args(["test", "--workspace", "--doc", "--no-fail-fast"]);
            command.env("OMP_NUM_THREADS", threads().to_string());
            // Begun first, because it takes long.
            queue.push(Job { name: "the documentation's examples".into(), command, weight: u64::MAX });
            Ok(())
        },
    )?;
    CHOICES.iter().filter_map(|choice| choice.missing(&flags)).for_each(|reason| filter.skip(reason));
    Ok((!failed.is_empty()).then(|| format!("failed: {}", failed.join(", "))))
}

/// The jobs of an executable: under the machine's own implementations, and under each other choice that it depends on.
fn plan(workspace: &Workspace, test: &Executable, flags: &str, prepare: &dyn Fn(&mut Command)) -> Vec<Job> {
    let job = |name: String, arguments: &[&str], variables: &[(&str, &str)]| {
        let mut command = Command::new(&test.path);
        prepare(&mut command);
        let folder = jobs::folder(&workspace.root, &test.package);
        command.env("CARGO_MANIFEST_DIR", &folder).current_dir(folder);
        command.env("RUST_TEST_THREADS", "1").env("OMP_NUM_THREADS", threads().to_string());
        // Waiting threads of one executable leave the processor to the other.
        command.env("OMP_WAIT_POLICY", "passive");
        command.envs(variables.iter().copied()).arg("--show-output").args(arguments);
        // Large executables have many tests.
        Job { name, command, weight: std::fs::metadata(&test.path).map_or(0, |file| file.len()) }
    };
    let name = format!("{} of {}", test.name, test.package);
    let unforced = job(name.clone(), &[], &[]);
    let runs = |choice: &&choices::Choice| choice.missing(flags).is_none() && !choice.is_own(flags);
    let others = CHOICES.iter().filter(runs).filter_map(|choice| {
        let arguments = choice.arguments(&test.package, &test.name)?;
        Some(job(format!("{name} under `{}`", choice.name), &arguments, choice.variables))
    });
    std::iter::once(unforced).chain(others).collect()
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

/// Runs tests, prints the filtered output, and collects the skipped tests.
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

/// Runs the prebuilt tests as [`run_workspace`] runs those that it builds; with `extra` arguments under the machine's own implementations
/// alone, as cargo runs them.
fn run_bundled(
    workspace: &Workspace,
    bundle: &Manifest,
    extra: &[String],
    filter: &mut Filter,
) -> Result<Option<String>> {
    let fixtures = std::env::var_os("FRUGAL_FIXTURES")
        .filter(|path| !path.is_empty())
        .map_or_else(|| Ok(workspace.root.join("data/fixtures")), std::path::absolute)
        .context("FRUGAL_FIXTURES is not a usable path")?;
    let prepare = |command: &mut Command| {
        command.env("FRUGAL_FIXTURES", &fixtures).env("FRUGAL_EMBEDDED", workspace.root.join("data"));
        for (name, path) in &bundle.programs {
            command.env(format!("CARGO_BIN_EXE_{name}"), workspace.root.join(path));
        }
    };
    let flags = choices::processor_flags();
    let failed = jobs::run(
        slots(),
        filter,
        |line| println!("{line}"),
        |queue| {
            for test in &bundle.tests {
                let test = Executable {
                    name: test.name.clone(),
                    package: test.package.clone(),
                    test: true,
                    path: workspace.root.join(&test.path),
                };
                let choices = if extra.is_empty() { usize::MAX } else { 1 };
                for mut job in plan(workspace, &test, &flags, &prepare).into_iter().take(choices) {
                    job.command.args(extra.iter().filter(|arg| *arg != "--"));
                    queue.push(job);
                }
            }
            Ok(())
        },
    )?;
    Ok((!failed.is_empty()).then(|| format!("failed: {}", failed.join(", "))))
}

/// Number of executables that run concurrently.
fn slots() -> usize {
    processors().min(8)
}

/// Threads of each executable: with more than processors, they would wait for each other at the end of every operation.
fn threads() -> usize {
    processors() / slots()
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn what_depends_on_products_runs_once_for_each_choice() {
        let workspace = Workspace { root: PathBuf::from("/w"), bundle: None };
        let plan = |name: &str, package: &str, flags: &str| {
            let test =
                Executable { name: name.into(), package: package.into(), test: true, path: "/w/it".into() };
            plan(&workspace, &test, flags, &|_| ())
        };
        let names = |jobs: Vec<Job>| jobs.into_iter().map(|job| job.name).collect::<Vec<_>>();
        assert_eq!(names(plan("it", "report", "avx2")), ["it of report"]);
        let lora = plan("it", "lora", "avx2 avx512_bf16 GenuineIntel");
        let variable = |job: &Job, wanted: &str| {
            job.command
                .get_envs()
                .find(|(name, _)| *name == wanted)
                .and_then(|(_, value)| value?.to_str().map(str::to_owned))
        };
        assert_eq!(variable(&lora[0], "FRUGAL_SIMD"), None);
        assert_eq!(variable(&lora[1], "FRUGAL_SIMD").unwrap(), "avx2");
        assert_eq!(variable(&lora[1], "RUST_TEST_THREADS").unwrap(), "1");
        assert_eq!(
            names(lora),
            ["it of lora", "it of lora under `avx2`", "it of lora under `bf16 products`"]
        );
        assert_eq!(plan("it", "lora", "sse").len(), 1, "what the processor lacks is left out");
        let frugal = plan("it", "frugal", "avx2");
        let arguments: Vec<usize> = frugal.iter().map(|job| job.command.get_args().count()).collect();
        assert!(arguments[0] == 1 && arguments[1] > 1, "some of its tests run again");
        assert_eq!(plan("frugal", "frugal", "avx2").len(), 1, "none of the unit tests");
    }

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
