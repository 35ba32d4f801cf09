//! Progress of a long step: a bar on a terminal, machine-readable lines under `cargo xtask run-all`, else nothing.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::without_controls;

/// Set to `lines` by a parent process that draws the bar itself and reads `@progress DONE TOTAL MESSAGE` lines
/// from standard error.
pub const PROGRESS_VARIABLE: &str = "FRUGAL_PROGRESS";

/// Returns whether progress is shown: standard error is a terminal, or a parent process draws the bar.
pub fn is_shown() -> bool {
    are_lines() || std::io::stderr().is_terminal()
}

fn are_lines() -> bool {
    std::env::var(PROGRESS_VARIABLE).is_ok_and(|value| value == "lines")
}

/// A `@progress DONE TOTAL MESSAGE` line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Returns the number of completed steps.
    pub done: u64,
    /// Steps in all.
    pub total: u64,
    /// Empty when the line has none.
    pub message: String,
}

impl Step {
    /// Reads a line; `None` for one that is not about progress.
    ///
    /// ```
    /// use report::progress::Step;
    ///
    /// let step = Step::parse("@progress 3 10 batch 8").unwrap();
    /// assert_eq!((step.done, step.total, &*step.message), (3, 10, "batch 8"));
    /// assert_eq!(Step::parse("loss 3.2"), None);
    /// ```
    pub fn parse(line: &str) -> Option<Self> {
        let rest = line.strip_prefix("@progress ")?.trim_start();
        let (done, rest) = rest.split_once(' ')?;
        let (total, message) = rest.split_once(' ').unwrap_or((rest, ""));
        let (done, total) = (done.parse().ok()?, total.trim_end().parse().ok()?);
        Some(Self { done, total, message: message.trim().to_owned() })
    }
}

/// Progress through a known number of steps.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    lines: bool,
    done: u64,
    total: u64,
}

impl Progress {
    /// Starts at zero of `total` steps.
    pub fn new(total: u64) -> Self {
        let lines = are_lines();
        let bar = (!lines && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{bar:12} {pos}/{len} {elapsed} {wide_msg}")
                .expect("the template is a constant");
            ProgressBar::new(total).with_style(style)
        });
        Self { bar, lines, done: 0, total }
    }

    /// Sets the message of the current step.
    pub fn message(&self, message: &str) {
        let message = without_controls(message);
        if let Some(bar) = &self.bar {
            bar.set_message(message.to_string());
        }
        if self.lines {
            eprintln!("@progress {} {} {message}", self.done, self.total);
        }
    }

    /// Writes text, without control characters, to standard error, above the bar if there is one.
    pub fn print(&self, text: &str) {
        self.suspend(|| eprint!("{}", without_controls(text)));
    }

    /// Runs what writes to the terminal, above the bar if there is one.
    pub fn suspend<R>(&self, write: impl FnOnce() -> R) -> R {
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// Shows the progress that a child process reports.
    pub fn follow(&mut self, step: Step) {
        let Step { done, total, message } = step;
        (self.done, self.total) = (done, total);
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
            if !message.is_empty() {
                bar.set_message(without_controls(&message).into_owned());
            }
        } else if self.lines {
            eprintln!("{}", format!("@progress {done} {total} {message}").trim_end());
        }
    }

    /// Returns whether there is a bar, or a parent process that draws one.
    pub fn is_seen(&self) -> bool {
        self.bar.is_some() || self.lines
    }

    /// Advances by one step.
    pub fn step(&mut self) {
        self.done += 1;
        if let Some(bar) = &self.bar {
            bar.set_position(self.done);
        }
        if self.lines {
            eprintln!("@progress {} {}", self.done, self.total);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_lines_are_told_from_others() {
        let check = |line: &str, expected: Option<(u64, u64, &str)>| {
            let step = expected.map(|(done, total, message)| Step { done, total, message: message.into() });
            assert_eq!(Step::parse(line), step, "{line}");
        };
        check("@progress 3 10 batch 8, level SaveOne", Some((3, 10, "batch 8, level SaveOne")));
        check("@progress 3 10", Some((3, 10, "")));
        check("@progress 3 10 ", Some((3, 10, "")));
        check("@progress 0 0 starting", Some((0, 0, "starting")));
        check("@progress three 10", None);
        check("@progress 3", None);
        check("@progress", None);
        check(" @progress 3 10", None);
        check("progress 3 10", None);
    }
}
