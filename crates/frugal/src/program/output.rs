//! Results on standard output.

use std::io::Write;

use frugal::loss_log::{of_evaluation, of_step};
use serde_json::Value;
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};

/// A line to the user on standard error, beside the result.
pub(crate) fn note(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// One JSON object on a line of standard output.
#[allow(clippy::print_stdout, reason = "the result of a program goes to standard output")]
pub(crate) fn print_line(value: &Value) {
    // Nobody reading is no reason to stop.
    let _ = writeln!(std::io::stdout().lock(), "{value}");
}

/// A text with its own line breaks on standard output.
#[allow(clippy::print_stdout, reason = "the result of a program goes to standard output")]
pub(crate) fn print_text(text: &str) {
    let _ = write!(std::io::stdout().lock(), "{text}");
}

/// A column of names and one of texts on standard output.
#[allow(clippy::print_stdout, reason = "the result of a program goes to standard output")]
pub(crate) fn print_lines<'a>(lines: impl Iterator<Item = (&'a str, &'a str)>) {
    let lines: Vec<(&str, &str)> = lines.collect();
    let width = lines.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let mut out = std::io::stdout().lock();
    for (name, text) in lines {
        let _ = writeln!(out, "{}", format!("{name:width$}  {text}").trim_end());
    }
}

/// Steps and evaluations on standard output.
pub(crate) struct Lines;

impl Observer for Lines {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        print_line(&of_step(record));
        Ok(())
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> training::Result<()> {
        print_line(&of_evaluation(evaluation));
        Ok(())
    }
}
