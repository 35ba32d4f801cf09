//! `robustness faults`: system calls on the output's files that fail, one after the other.
//!
//! `faults.c`, loaded into the program, counts the calls that write, sync, rename, create and remove files of the output. Then the command
//! runs again and again, and another call fails each time. After each failure the command runs once more without any, and its results are
//! compared, byte for byte, with those of a run that nobody disturbed.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, ensure};
use report::{Case, Metric};

use super::recovery::Recovery;
use super::work::{Results, Sandbox, Work, named};
use crate::driver::Bench;

#[derive(clap::Args)]
pub(crate) struct Faults {
    /// Calls of each command that fail, at most, evenly spaced over all [default: by scale]
    #[arg(long)]
    tries: Option<u64>,
    /// Only these commands
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
}

/// A failure to inject into a call.
#[derive(Clone, Copy, Debug)]
struct Fault {
    /// Its name in the report.
    name: &'static str,
    /// Its name in `faults.c`.
    kind: &'static str,
    /// A text that the error must contain; `None` where the program is killed or notices nothing.
    error: Option<&'static str>,
}

const FAULTS: [Fault; 6] = [
    Fault { name: "killed within the call", kind: "kill", error: None },
    Fault { name: "disk full from there on", kind: "enospc", error: Some("No space left on device") },
    Fault { name: "input/output error, once", kind: "eio", error: Some("Input/output error") },
    Fault { name: "read-only from there on", kind: "erofs", error: Some("Read-only file system") },
    Fault { name: "half of each write from there on", kind: "short", error: None },
    Fault { name: "time of day jumps by years from there on", kind: "clock", error: None },
];

/// The outcomes of one kind of failure in one command.
#[derive(Debug, Default)]
struct Outcome {
    tries: usize,
    /// Ended well, with the right results: the failure was of something that is not needed.
    tolerated: usize,
    /// An error that names the cause.
    clear: usize,
    /// An error that does not, or a panic.
    unclear: usize,
    recovery: Recovery,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Faults) -> anyhow::Result<()> {
    let works: Vec<Work> =
        named(&arguments.only, bench.scale)?.into_iter().filter(|work| work.alone).collect();
    let tries = arguments.tries.unwrap_or(bench.sized([1, 3, 100, 100]));
    let sandbox = Sandbox::new()?;
    let library = match compile(&sandbox.path("faults.so")) {
        Ok(library) => library,
        Err(error) => {
            let why = format!("{error:#}");
            for (work, fault) in works.iter().flat_map(|work| FAULTS.map(|fault| (work, fault))) {
                bench.put(&case(work, &fault), vec![Metric::not_measured("lost", "", &why)])?;
            }
            return Ok(());
        }
    };
    bench.expect(works.len() * FAULTS.len());
    for work in works {
        bench.message(work.name);
        sandbox.succeed(sandbox.command(&work, "reference"))?;
        let expected = sandbox.results(&work, "reference")?;
        let calls = count(&sandbox, &work, &library)?;
        for fault in FAULTS {
            let outcome = inject(&sandbox, &work, &fault, &library, spread(calls, tries), &expected)?;
            let count = |name: &str, count: usize| Metric::exact(name, "", count as f64);
            let mut metrics = vec![
                count("calls", calls as usize),
                count("tries", outcome.tries),
                count("tolerated", outcome.tolerated),
                count("clear_errors", outcome.clear),
                count("unclear_errors", outcome.unclear),
            ];
            metrics.extend(outcome.recovery.metrics());
            bench.put(&case(&work, &fault), metrics)?;
            bench.step();
        }
        sandbox.remove("reference")?;
    }
    Ok(())
}

fn case(work: &Work, fault: &Fault) -> Case {
    Case::new().with("command", work.name).with("fault", fault.name)
}

/// Compiles `faults.c` with the machine's compiler.
fn compile(to: &Path) -> anyhow::Result<PathBuf> {
    let source = to.with_extension("c");
    std::fs::write(&source, include_str!("faults.c"))?;
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let output = Command::new(&compiler)
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .arg(to)
        .arg(&source)
        .arg("-ldl")
        .output();
    let output = output
        .with_context(|| format!("`{compiler}` cannot be run, which compiles what makes calls fail"))?;
    ensure!(output.status.success(), "`{compiler}` failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(to.to_owned())
}

/// The command with the library loaded.
fn command(sandbox: &Sandbox, work: &Work, out: &str, library: &Path, kind: &str) -> Command {
    let mut command = sandbox.command(work, out);
    command.env("LD_PRELOAD", library).env("FAULT_FOLDER", sandbox.outputs()).env("FAULT_KIND", kind);
    command
}

/// The calls of an undisturbed run.
fn count(sandbox: &Sandbox, work: &Work, library: &Path) -> anyhow::Result<u64> {
    let file = sandbox.path("calls");
    let mut command = command(sandbox, work, "counted", library, "count");
    command.env("FAULT_COUNT", &file);
    sandbox.succeed(command)?;
    sandbox.remove("counted")?;
    let calls = std::fs::read_to_string(&file).context("the number of calls")?;
    calls.trim().parse().context("the number of calls")
}

/// At most `most` of the numbers from 1 to `calls`, evenly spaced, with the first.
fn spread(calls: u64, most: u64) -> impl Iterator<Item = u64> {
    let most = most.min(calls);
    (0..most).map(move |number| 1 + number * calls / most)
}

fn inject(
    sandbox: &Sandbox,
    work: &Work,
    fault: &Fault,
    library: &Path,
    numbers: impl Iterator<Item = u64>,
    expected: &Results,
) -> anyhow::Result<Outcome> {
    let mut outcome = Outcome::default();
    for number in numbers {
        let note = |what: &str| eprintln!("{}, {}, call {number}: {what}", work.name, fault.name);
        let out = format!("fault-{number}");
        let mut command = command(sandbox, work, &out, library, fault.kind);
        let Output { status, stderr, .. } = command.env("FAULT_AT", number.to_string()).output()?;
        let message = String::from_utf8_lossy(&stderr);
        outcome.tries += 1;
        if status.success() {
            outcome.tolerated += 1;
        } else if fault.error.is_some_and(|text| message.contains(text)) && !message.contains("panicked") {
            outcome.clear += 1;
        } else if fault.kind != "kill" || status.code().is_some() {
            outcome.unclear += 1;
            note(&format!("{status}: {message}"));
        }
        outcome.recovery.inspect((sandbox, work), &out, expected, &note);
        outcome.recovery.run_again((sandbox, work), &out, expected, &note)?;
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calls_that_fail_are_spread_over_all() {
        assert_eq!(spread(3, 100).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(spread(10, 4).collect::<Vec<_>>(), [1, 3, 6, 8]);
        assert_eq!(spread(0, 4).count(), 0);
    }
}
