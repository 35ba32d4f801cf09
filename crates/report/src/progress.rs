//! Progress of a long step: a bar on a terminal, machine-readable lines under `cargo xtask run-all`, else nothing.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

/// Set to `lines` by a parent process that draws the bar itself and reads `@progress DONE TOTAL MESSAGE` lines
/// from standard error.
pub const PROGRESS_VARIABLE: &str = "FRUGAL_PROGRESS";

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
        let lines = std::env::var(PROGRESS_VARIABLE).is_ok_and(|v| v == "lines");
        let bar = (!lines && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{bar:12} {pos}/{len} {elapsed} {wide_msg}")
                .expect("the template is a constant");
            ProgressBar::new(total).with_style(style)
        });
        Self { bar, lines, done: 0, total }
    }

    /// Sets the message of the current step.
    pub fn message(&self, message: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(message.to_owned());
        }
        if self.lines {
            eprintln!("@progress {} {} {message}", self.done, self.total);
        }
    }

    /// Writes text to standard error, above the bar if there is one.
    pub fn print(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprint!("{text}")),
            None => eprint!("{text}"),
        }
    }

    /// Whether there is a bar, or a parent process that draws one.
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
