//! Test executables as jobs, several of which run concurrently.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};

use super::output::Filter;

/// One executable under one choice of implementations.
pub(super) struct Job {
    /// Its displayed name.
    pub(super) name: String,
    pub(super) executable: PathBuf,
    pub(super) folder: PathBuf,
    pub(super) variables: Vec<(String, String)>,
    pub(super) arguments: Vec<String>,
}

/// Runs all jobs in their order, `slots` at a time, and passes the filtered output of each to `print` when it has ended.
/// Returns the names of those that failed.
///
/// Each job is a process, whose tests run one after another, so that a test's changes to its process affect no other job.
pub(super) fn run(
    jobs: &[Job],
    slots: usize,
    prepare: impl Fn(&mut Command) + Sync,
    filter: &mut Filter,
    print: impl Fn(&str) + Sync,
) -> Result<Vec<String>> {
    let next = AtomicUsize::new(0);
    let shared = Mutex::new((filter, Vec::new()));
    let failure = std::thread::scope(|scope| {
        let work = || -> Result<()> {
            loop {
                let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) else { return Ok(()) };
                let start = Instant::now();
                let (succeeded, lines) = run_one(job, &prepare)?;
                let mut shared = shared.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                let (filter, failed) = &mut *shared;
                print(&format!("\n     Ran {} in {:.1} s", job.name, start.elapsed().as_secs_f64()));
                for line in &lines {
                    if let Some(line) = filter.line(line) {
                        print(line);
                    }
                }
                if !succeeded {
                    failed.push(job.name.clone());
                }
            }
        };
        let workers: Vec<_> = (0..slots.max(1)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().find_map(|worker| worker.join().expect("a worker does not panic").err())
    });
    let (_, failed) = shared.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    failure.map_or(Ok(failed), Err)
}

/// Whether it succeeded, and the lines of its standard output.
fn run_one(job: &Job, prepare: impl Fn(&mut Command)) -> Result<(bool, Vec<String>)> {
    let mut command = Command::new(&job.executable);
    prepare(&mut command);
    command.current_dir(&job.folder).env("CARGO_MANIFEST_DIR", &job.folder).env("RUST_TEST_THREADS", "1");
    command.envs(job.variables.iter().cloned()).args(&job.arguments);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", job.executable.display()))?;
    // A test that aborts its process prints the reason to standard error; the standard error of passing tests is dropped.
    let errors = child.stderr.take().expect("standard error is piped");
    let errors = std::thread::spawn(move || lines(errors));
    let mut lines = lines(child.stdout.take().expect("standard output is piped"));
    let succeeded = child.wait().context("cannot wait for the tests")?.success();
    let errors = errors.join().expect("reading does not panic");
    if !succeeded {
        lines.extend(errors);
    }
    Ok((succeeded, lines))
}

fn lines(stream: impl std::io::Read) -> Vec<String> {
    let lines = BufReader::new(stream).split(b'\n').map_while(std::result::Result::ok);
    lines.map(|line| String::from_utf8_lossy(&line).into_owned()).collect()
}

/// The package's folder: `crates/<package>`, or `<package>` at the top of the workspace.
pub(super) fn folder(root: &Path, package: &str) -> PathBuf {
    let own = root.join(package);
    if own.join("Cargo.toml").exists() { own } else { root.join("crates").join(package) }
}
