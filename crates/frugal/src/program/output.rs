//! Results on standard output.

use std::io::{IsTerminal, Write};

use frugal::loss_log::{of_evaluation, of_step};
use frugal::text_stream::without_controls;
use serde_json::Value;
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};

use super::Common;

/// Writes a line to standard error, unless `--quiet`.
pub(crate) fn say(common: &Common, line: &str) {
    if !common.quiet {
        let _ = writeln!(std::io::stderr().lock(), "{line}");
    }
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

/// Writes text at once, to a terminal without control characters; false if the pipe is closed.
#[allow(clippy::print_stdout, reason = "the result of a program goes to standard output")]
pub(crate) fn show(text: &str) -> bool {
    let mut out = std::io::stdout().lock();
    let text = if out.is_terminal() { without_controls(text) } else { text.into() };
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok()
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

/// Prints fields (a name, its text, and its JSON value) to standard output: in columns, or as one JSON object.
pub(crate) fn print_fields<N: AsRef<str>>(common: &Common, fields: Vec<(N, String, Value)>) {
    if common.json {
        let fields = fields.into_iter().map(|(name, _, value)| (name.as_ref().replace(' ', "_"), value));
        print_line(&Value::Object(fields.collect()));
    } else {
        print_lines(fields.iter().map(|(name, text, _)| (name.as_ref(), text.as_str())));
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
