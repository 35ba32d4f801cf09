//! The output of the ranks, above the progress bar of rank 0.
//!
//! The output of ranks is piped, so rank 0 sees no terminal. It writes its progress as lines, from which the launcher draws the bar, as
//! `cargo xtask run-all` does.

use std::io::Write;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use report::Progress;
use report::progress::{self, PROGRESS_VARIABLE, Step};
use runtime::collectives::ranks::Output;

use crate::output::print_coloured;

/// Standard output and standard error of the launcher.
#[derive(Debug)]
pub(super) struct Screen {
    /// Whether progress is shown.
    shows: bool,
    /// Whether the standard output of rank 0 is a result for programs.
    is_json: bool,
    bar: Mutex<Option<Progress>>,
}

impl Screen {
    /// Shows progress unless it is to be `quiet`, if standard error is a terminal or a parent process draws the bar.
    pub(super) fn new(quiet: bool, is_json: bool) -> Self {
        Self { shows: !quiet && progress::is_shown(), is_json, bar: Mutex::default() }
    }

    /// Asks rank 0, and no other, for its progress.
    pub(super) fn ask(&self, rank: usize, command: &mut Command) {
        if self.shows && rank == 0 {
            command.env(PROGRESS_VARIABLE, "lines");
        } else {
            command.env_remove(PROGRESS_VARIABLE);
        }
    }

    /// Prints a line of a rank behind its number, or a line of a result as it is, or draws the progress that it reports.
    pub(super) fn line(&self, rank: usize, output: Output, line: &str) {
        let step = (self.shows && rank == 0 && output == Output::Error).then(|| Step::parse(line)).flatten();
        if let Some(step) = step {
            let mut bar = self.bar.lock().unwrap_or_else(PoisonError::into_inner);
            return bar.get_or_insert_with(|| Progress::new(step.total)).follow(step);
        }
        let is_result = self.is_json && rank == 0 && output == Output::Standard;
        let line = if is_result { format!("{line}\n") } else { format!("[{rank}] {line}\n") };
        // Output that cannot be written does not stop the ranks.
        self.above(|| match output {
            Output::Standard if is_result || !self.is_json => print_coloured(&line),
            Output::Standard | Output::Error => drop(std::io::stderr().lock().write_all(line.as_bytes())),
        });
    }

    /// Runs what writes to the terminal, above the bar if there is one.
    pub(super) fn above(&self, write: impl FnOnce()) {
        match &*self.bar.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// Removes the bar.
    pub(super) fn clear(&self) {
        drop(self.bar.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}
