//! `cargo xtask test`: sets up, then runs every test; in a bundle, the prebuilt ones.
//!
//! The whole workspace is built at once and its test executables run beside each other, one for each processor; then those whose
//! results depend on matrix products and vector kernels run again under each other implementation ([`choices`]); then the
//! documentation's examples. With arguments it is `cargo test` with these.

mod choices;
mod jobs;
mod output;

use std::io::{BufRead, BufReader};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};

use crate::cargo::Executable;
use crate::workspace::{Manifest, Workspace};
use crate::{cargo, setup};
use choices::CHOICES;
use jobs::Job;
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

fn run_workspace(workspace: &Workspace, filter: &mut Filter) -> Result<Option<String>> {
    // `--tests` links no examples; the tests that include an example compile it.
    let mut tests = cargo::executables(workspace, &["test", "--workspace", "--tests", "--no-run"])?;
    tests.retain(|executable| executable.test);
    let tests = largest_first(tests);
    let flags = choices::processor_flags();
    let skipped = CHOICES.iter().filter_map(|choice| choice.missing(&flags)).collect::<Vec<_>>();
    let jobs = plan(workspace, &tests, &flags);
    let slots = slots();
    eprintln!("test: {}, {slots} at a time", count(jobs.len(), "executable", "executables"));
    let mut fixtures = Command::new("true");
    with_fixtures(&mut fixtures)?;
    let prepare = |command: &mut Command| {
        cargo::with_libtorch(command, workspace);
        // Waiting threads of one executable leave the processor to the other.
        command.env("OMP_WAIT_POLICY", "passive");
        command.envs(fixtures.get_envs().filter_map(|(name, value)| Some((name, value?))));
    };
    let mut failed = jobs::run(&jobs, slots, prepare, filter, |line| println!("{line}"))?;

    let args = ["test", "--workspace", "--doc", "--no-fail-fast"];
    eprintln!("test: cargo {}", args.join(" "));
    let mut command = cargo::command(workspace);
    command.args(args);
    if !run_filtered(command, filter)?.success() {
        failed.push("documentation examples".into());
    }
    skipped.into_iter().for_each(|reason| filter.skip(reason));
    Ok((!failed.is_empty()).then(|| format!("failed: {}", failed.join(", "))))
}

/// Returns every executable under the machine's own implementations, then the affected ones under each other choice.
fn plan(workspace: &Workspace, tests: &[Executable], flags: &str) -> Vec<Job> {
    let job = |test: &Executable, choice: Option<&choices::Choice>, names: &[&str]| Job {
        name: match choice {
            None => format!("{} of {}", test.name, test.package),
            Some(choice) => format!("{} of {} under `{}`", test.name, test.package, choice.name),
        },
        executable: test.path.clone(),
        folder: jobs::folder(&workspace.root, &test.package),
        variables: choice.map_or_else(Vec::new, |choice| {
            choice.variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
        }),
        arguments: std::iter::once("--show-output")
            .chain(names.iter().copied())
            .chain(choice.into_iter().flat_map(|_| choices::ONCE.iter().flat_map(|name| ["--skip", name])))
            .map(str::to_owned)
            .collect(),
    };
    let own = tests.iter().map(|test| job(test, None, &[]));
    let others = CHOICES.iter().filter(|choice| choice.missing(flags).is_none()).flat_map(|choice| {
        tests.iter().filter_map(move |test| Some(job(test, Some(choice), choice.tests_of(&test.package)?)))
    });
    own.chain(others).collect()
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

/// Runs the prebuilt tests as [`run_workspace`] runs those that it builds.
fn run_bundled(
    workspace: &Workspace,
    bundle: &Manifest,
    extra: &[String],
    filter: &mut Filter,
) -> Result<Option<String>> {
    let tests: Vec<Executable> = bundle
        .tests
        .iter()
        .map(|test| Executable {
            name: test.name.clone(),
            package: test.package.clone(),
            test: true,
            path: workspace.root.join(&test.path),
        })
        .collect();
    let mut jobs = plan(workspace, &largest_first(tests), &choices::processor_flags());
    for job in &mut jobs {
        job.arguments.extend(extra.iter().filter(|arg| *arg != "--").cloned());
    }
    let fixtures = std::env::var_os("FRUGAL_FIXTURES")
        .filter(|path| !path.is_empty())
        .map_or_else(|| Ok(workspace.root.join("data/fixtures")), std::path::absolute)
        .context("FRUGAL_FIXTURES is not a usable path")?;
    let prepare = |command: &mut Command| {
        command.env("OMP_WAIT_POLICY", "passive").env("FRUGAL_FIXTURES", &fixtures);
        command.env("FRUGAL_EMBEDDED", workspace.root.join("data"));
        for (name, path) in &bundle.programs {
            command.env(format!("CARGO_BIN_EXE_{name}"), workspace.root.join(path));
        }
    };
    let failed = jobs::run(&jobs, slots(), prepare, filter, |line| println!("{line}"))?;
    Ok((!failed.is_empty()).then(|| format!("failed: {}", failed.join(", "))))
}

/// Sorts the largest first: they run longest, so the last ones are short.
fn largest_first(mut tests: Vec<Executable>) -> Vec<Executable> {
    tests.sort_by_cached_key(|test| {
        std::cmp::Reverse(std::fs::metadata(&test.path).map_or(0, |file| file.len()))
    });
    tests
}

/// Number of executables that run concurrently. Each has libtorch's own threads, so more would gain nothing.
fn slots() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(8)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn what_depends_on_products_runs_once_for_each_choice() {
        let workspace = Workspace { root: PathBuf::from("/w"), bundle: None };
        let test = |package: &str| Executable {
            name: "it".into(),
            package: package.into(),
            test: true,
            path: "/w/target/it".into(),
        };
        let jobs = plan(&workspace, &[test("report"), test("lora")], "avx2 avx512_bf16");
        let names: Vec<&str> = jobs.iter().map(|job| job.name.as_str()).collect();
        let expected =
            ["it of report", "it of lora", "it of lora under `avx2`", "it of lora under `bf16 products`"];
        assert_eq!(names, expected);
        assert!(jobs[0].variables.is_empty());
        assert!(jobs[2].variables.contains(&("FRUGAL_SIMD".into(), "avx2".into())));
        assert_eq!(plan(&workspace, &[test("lora")], "sse").len(), 1, "what the processor lacks is left out");
        let jobs = plan(&workspace, &[test("frugal")], "avx2");
        assert!(jobs[0].arguments.len() == 1 && jobs[1].arguments.len() > 1, "some of its tests run again");
    }

    #[test]
    fn jobs_run_with_their_variables_and_those_that_fail_are_named() {
        let job = |name: &str, script: &str| Job {
            name: name.into(),
            executable: "/bin/sh".into(),
            folder: "/".into(),
            variables: vec![("CHOICE".into(), "avx2".into())],
            arguments: vec!["-c".into(), script.into()],
        };
        let jobs = [
            job(
                "one",
                "echo \"test result: ok. 2 passed; 0 failed\"; test \"$CHOICE $RUST_TEST_THREADS\" = 'avx2 1'",
            ),
            job("two", "echo \"test result: FAILED. 1 passed; 3 failed\"; exit 101"),
        ];
        for slots in [1, 2] {
            let mut filter = Filter::default();
            let shown = std::sync::Mutex::new(Vec::new());
            let print = |line: &str| shown.lock().unwrap().push(line.to_owned());
            assert_eq!(jobs::run(&jobs, slots, |_| {}, &mut filter, print).unwrap(), ["two"]);
            assert_eq!((filter.passed, filter.failed), (3, 3));
            assert!(
                shown.into_inner().unwrap().contains(&"test result: FAILED. 1 passed; 3 failed".to_owned())
            );
        }
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
