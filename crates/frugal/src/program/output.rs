//! Results on standard output.

use std::io::Write;

use frugal::loss_log::{of_evaluation, of_step};
use serde_json::Value;
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};

/// Writes a line for people to standard error.
pub(crate) fn note(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Writes a JSON object as a line to standard output.
#[allow(clippy::print_stdout, reason = "the result of a program goes to standard output")]
pub(crate) fn print_line(value: &Value) {
    // A closed pipe does not stop the program.
    let _ = writeln!(std::io::stdout().lock(), "{value}");
}

/// Writes a text with its own line breaks to standard output.
#[allow(clippy::print_stdout, reason = "the result of a program goes to standard output")]
pub(crate) fn print_text(text: &str) {
    let _ = write!(std::io::stdout().lock(), "{text}");
}

/// Writes a column of names and one of texts to standard output.
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
