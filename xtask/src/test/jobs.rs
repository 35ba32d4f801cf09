//! Test executables as jobs that run concurrently.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result};

use super::output::Filter;

/// An executable under one choice of implementations, or the documentation's examples.
pub(super) struct Job {
    /// Its displayed name.
    pub(super) name: String,
    pub(super) command: Command,
    /// Of the waiting jobs, the one with the largest weight runs first.
    pub(super) weight: u64,
}

/// The jobs that wait for a slot. More arrive while the workspace is built, and until then half of the slots are cargo's.
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    slots: usize,
}

struct State {
    waiting: Vec<Job>,
    running: usize,
    complete: bool,
}

impl Queue {
    fn new(slots: usize) -> Self {
        let state = State { waiting: Vec::new(), running: 0, complete: false };
        Self { state: Mutex::new(state), changed: Condvar::new(), slots }
    }

    pub(super) fn push(&self, job: Job) {
        self.lock().waiting.push(job);
        self.changed.notify_all();
    }

    /// No more jobs arrive; after a failed build those that wait are dropped.
    fn complete(&self, built: bool) {
        let mut state = self.lock();
        state.complete = true;
        if !built {
            state.waiting.clear();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits for a job and a slot; `None` after the last job.
    fn take(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            let slots = if state.complete { self.slots } else { (self.slots / 2).max(1) };
            let heaviest = (0..state.waiting.len()).max_by_key(|&index| state.waiting[index].weight);
            match heaviest {
                Some(index) if state.running < slots => {
                    state.running += 1;
                    return Some(state.waiting.swap_remove(index));
                }
                None if state.complete => return None,
                _ => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn ended(&self) {
        self.lock().running -= 1;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs the jobs that `fill` adds, `slots` at a time and also while it still adds, and passes the filtered output of each to
/// `print` when it has ended. Returns the names of those that failed.
///
/// Each job is a process, whose tests run one after another, so that a test's changes to its process affect no other job.
pub(super) fn run(
    slots: usize,
    filter: &mut Filter,
    print: impl Fn(&str) + Sync,
    fill: impl FnOnce(&Queue) -> Result<()>,
) -> Result<Vec<String>> {
    let queue = Queue::new(slots.max(1));
    let shared = Mutex::new((filter, Vec::new()));
    let work = || -> Result<()> {
        while let Some(job) = queue.take() {
            let start = Instant::now();
            let name = job.name.clone();
            let result = run_one(job);
            queue.ended();
            let (succeeded, lines) = result?;
            let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
            let (filter, failed) = &mut *shared;
            print(&format!("\n     Ran {name} in {:.1} s", start.elapsed().as_secs_f64()));
            for line in &lines {
                if let Some(line) = filter.line(line) {
                    print(line);
                }
            }
            if !succeeded {
                failed.push(name);
            }
        }
        Ok(())
    };
    let failure = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..queue.slots).map(|_| scope.spawn(work)).collect();
        let filled = fill(&queue);
        queue.complete(filled.is_ok());
        let failures = workers.into_iter().map(|worker| worker.join().expect("a worker does not panic"));
        // All workers are awaited.
        failures.fold(filled, |first, other| first.and(other))
    });
    let (_, failed) = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
    failure.map(|()| failed)
}

/// Whether it succeeded, and the lines of its standard output.
fn run_one(mut job: Job) -> Result<(bool, Vec<String>)> {
    let mut child = job
        .command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", job.command.get_program().display()))?;
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
    let folder = root.join(package);
    if folder.join("Cargo.toml").exists() { folder } else { root.join("crates").join(package) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &str, weight: u64, script: &str) -> Job {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        Job { name: name.into(), command, weight }
    }

    #[test]
    fn those_that_fail_are_named_and_results_are_counted() {
        for slots in [1, 2] {
            let mut filter = Filter::default();
            let shown = Mutex::new(Vec::new());
            let print = |line: &str| shown.lock().unwrap().push(line.to_owned());
            let failed = run(slots, &mut filter, print, |queue| {
                queue.push(job("one", 1, "echo \"test result: ok. 2 passed; 0 failed\""));
                queue.push(job("two", 1, "echo \"test result: FAILED. 1 passed; 3 failed\"; exit 101"));
                Ok(())
            });
            assert_eq!(failed.unwrap(), ["two"]);
            assert_eq!((filter.passed, filter.failed), (3, 3));
            assert!(
                shown.into_inner().unwrap().contains(&"test result: FAILED. 1 passed; 3 failed".to_owned())
            );
        }
    }

    #[test]
    fn the_heaviest_of_those_that_wait_runs_first() {
        let queue = Queue::new(2);
        for (name, weight) in [("light", 1), ("heavy", 9), ("middle", 5)] {
            queue.push(job(name, weight, "true"));
        }
        assert_eq!(queue.take().unwrap().name, "heavy");
        queue.complete(true);
        assert_eq!(queue.take().unwrap().name, "middle");
        queue.ended();
        assert_eq!(queue.take().unwrap().name, "light");
        assert!(queue.take().is_none());
    }

    #[test]
    fn jobs_run_during_the_build() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ran");
        let mut filter = Filter::default();
        let failed = run(
            2,
            &mut filter,
            |_| (),
            |queue| {
                queue.push(job("first", 1, &format!("touch {}", file.display())));
                while !file.exists() {
                    std::thread::yield_now();
                }
                Ok(())
            },
        );
        assert!(failed.unwrap().is_empty());
    }

    #[test]
    fn after_a_failed_build_those_that_wait_are_dropped() {
        let queue = Queue::new(2);
        queue.push(job("waits", 1, "true"));
        queue.complete(false);
        assert!(queue.take().is_none());
        let failed = run(2, &mut Filter::default(), |_| (), |_| anyhow::bail!("the build failed"));
        assert_eq!(failed.unwrap_err().to_string(), "the build failed");
    }
}
