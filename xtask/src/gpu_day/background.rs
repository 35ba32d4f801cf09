//! Work in the background of a day, on cores of its own.
//!
//! Compiling a peer takes a minute or two of processor time, and the first parts are tests. So it begins with the day, on three quarters of
//! the cores; parts that run meanwhile have the rest, and their records say what ran beside them. The part that uses what was compiled
//! waits until it is there.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::part::{Day, end_group, found, how_it_ended};
use super::plan::BackgroundWork;
use super::table::{Row, Verdict};
use crate::compare::NO_MODULE;
use crate::pages::Folder;

/// Background work that was started, or why it was not.
pub(super) struct Background {
    pub(super) name: String,
    state: State,
    start: Instant,
    deadline: Duration,
    /// When it ended.
    end: Option<Instant>,
}

enum State {
    Runs(Child),
    Ended(ExitStatus),
    /// Ended at its deadline.
    Late,
    NotStarted(String),
}

impl Background {
    pub(super) fn start(work: &BackgroundWork, day: &Day<'_>) -> Result<Self> {
        let deadline = Duration::from_secs_f64(work.seconds as f64 * day.share);
        let state = match Self::command(work, day)? {
            Err(why) => State::NotStarted(why),
            Ok(mut command) => {
                let log = day.folder.fresh_log(&format!("gpu-day-{}", work.name))?;
                let file =
                    File::create(&log).with_context(|| format!("cannot write the log {}", log.display()))?;
                let errors = file.try_clone().context("cannot write a log twice")?;
                command.stdin(Stdio::null()).stdout(file).stderr(errors).process_group(0);
                State::Runs(command.spawn().with_context(|| format!("cannot start {}", work.name))?)
            }
        };
        Ok(Self { name: work.name.clone(), state, start: Instant::now(), deadline, end: None })
    }

    fn command(work: &BackgroundWork, day: &Day<'_>) -> Result<std::result::Result<Command, String>> {
        let Some((_, others)) = cores() else {
            return Ok(Err("there are no two cores, or no taskset to divide them".into()));
        };
        Ok(Ok(day.pinned(&others, day.compare(&work.compiles, work.dtype.as_deref(), &["--compile-only"])?)))
    }

    /// Whether it still runs. Ends it at its deadline.
    pub(super) fn runs(&mut self) -> bool {
        let State::Runs(child) = &mut self.state else { return false };
        let state = match child.try_wait() {
            Ok(Some(status)) => State::Ended(status),
            _ if self.start.elapsed() >= self.deadline => {
                // What cannot be ended is no reason to end the day.
                let _ = end_group(child);
                State::Late
            }
            _ => return true,
        };
        self.state = state;
        self.end = Some(Instant::now());
        false
    }

    /// Ends it, if it still runs, and returns its row.
    pub(super) fn finish(mut self, folder: &Folder) -> Row {
        let running = self.runs();
        if running && let State::Runs(child) = &mut self.state {
            let _ = end_group(child);
            self.state = State::Late;
        }
        let seconds = self.end.unwrap_or_else(Instant::now).duration_since(self.start).as_secs();
        let log = folder.log(&format!("gpu-day-{}", self.name));
        let verdict = match self.state {
            State::NotStarted(why) => Verdict::Skipped(why),
            State::Ended(status) if status.success() => Verdict::Passed,
            State::Ended(status) if status.code() == Some(i32::from(NO_MODULE)) => {
                Verdict::Skipped(how_it_ended(status, &log))
            }
            State::Ended(status) => Verdict::Failed(how_it_ended(status, &log)),
            State::Runs(_) | State::Late => {
                Verdict::Late { seconds, kept: "what it compiled is kept".into() }
            }
        };
        Row { name: self.name, verdict, seconds: seconds as f64, beside: None, background: true }
    }
}

/// The cores of the parts, and those of the background: a quarter, and the rest. `None` where they cannot be divided.
pub(super) fn cores() -> Option<(Vec<usize>, Vec<usize>)> {
    found("taskset")?;
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    divided(&listed(list))
}

fn divided(cores: &[usize]) -> Option<(Vec<usize>, Vec<usize>)> {
    let first = (cores.len() / 4).max(1);
    (cores.len() > first).then(|| (cores[..first].to_vec(), cores[first..].to_vec()))
}

/// The numbers of a list such as `0-3,8`.
fn listed(list: &str) -> Vec<usize> {
    let range = |part: &str| -> Option<Vec<usize>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some((first.trim().parse().ok()?..=last.trim().parse().ok()?).collect())
    };
    list.split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_a_quarter_of_the_cores_and_the_background_the_rest() {
        assert_eq!(listed("\t0-3,8, 10-11"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(listed(""), [0usize; 0]);
        assert_eq!(divided(&listed("0-15")), Some((vec![0, 1, 2, 3], (4..16).collect())));
        assert_eq!(divided(&[4, 7]), Some((vec![4], vec![7])));
        assert_eq!(divided(&[0]), None);
        assert_eq!(divided(&[]), None);
    }
}
