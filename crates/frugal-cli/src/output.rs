//! Results on standard output, and notes on standard error.
//!
//! A write to standard output that fails does not stop a command, which may be a training: the error is kept, and the program ends with it.
//! A closed pipe is not an error: its reader has seen enough. Control characters of texts that may come from data or names of files do not reach a
//! terminal.

pub(crate) mod curves;
pub(crate) mod ended_training;
pub(crate) mod figures;
mod points;
pub(crate) mod problems;
pub(crate) mod progress_bar;
pub(crate) mod records;
pub(crate) mod run_page;
pub(crate) mod shell_command;
pub(crate) mod summary;

use std::borrow::Cow;
use std::io::{self, ErrorKind, IsTerminal, StdoutLock, Write};
use std::sync::{Mutex, PoisonError};

use anyhow::Context;
use frugal::loss_log::{of_evaluation, of_step};
use report::cli::without_controls;
use serde_json::Value;
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};

/// The first error of standard output.
static ERROR: Mutex<Option<io::Error>> = Mutex::new(None);

/// Writes a line without control characters to standard error. Commands write notes by [`note`](crate::common_flags::Common::note).
pub(crate) fn note(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", without_controls(line));
}

/// Writes to standard output; false if that failed.
#[allow(clippy::print_stdout, reason = "the result of a program goes to standard output")]
fn put(write: impl FnOnce(&mut StdoutLock<'_>) -> io::Result<()>) -> bool {
    let written = write(&mut io::stdout().lock());
    let is_written = written.is_ok();
    if let Err(cause) = written
        && cause.kind() != ErrorKind::BrokenPipe
    {
        ERROR.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(cause);
    }
    is_written
}

/// Ends the output of the program.
///
/// # Errors
/// Standard output that could not be written, except a closed pipe.
pub(crate) fn finish() -> anyhow::Result<()> {
    put(|out| out.flush());
    match ERROR.lock().unwrap_or_else(PoisonError::into_inner).take() {
        None => Ok(()),
        Some(cause) => Err(cause).context("standard output cannot be written"),
    }
}

/// The text as standard output gets it.
fn shown<'a>(out: &StdoutLock<'_>, text: &'a str) -> Cow<'a, str> {
    if out.is_terminal() { without_controls(text) } else { text.into() }
}

/// Writes a JSON object as a line to standard output. Control characters that JSON leaves as they are, DEL and those of Latin-1, are
/// escaped.
pub(crate) fn print_line(value: &Value) {
    let mut line = value.to_string();
    if line.contains(char::is_control) {
        let escaped = |char: char| match char.is_control() {
            true => format!("\\u{:04x}", u32::from(char)),
            false => char.to_string(),
        };
        line = line.chars().map(escaped).collect();
    }
    put(|out| writeln!(out, "{line}"));
}

/// Writes a text with its own line breaks to standard output.
pub(crate) fn print_text(text: &str) {
    put(|out| {
        let text = shown(out, text);
        out.write_all(text.as_bytes())
    });
}

/// Writes a text with colours to standard output, whose parts have no other control characters.
pub(crate) fn print_coloured(text: &str) {
    put(|out| out.write_all(text.as_bytes()));
}

/// Writes text at once; false if that failed.
pub(crate) fn show(text: &str) -> bool {
    put(|out| {
        let text = shown(out, text);
        out.write_all(text.as_bytes()).and_then(|()| out.flush())
    })
}

/// Writes a column of names and one of texts to standard output.
pub(crate) fn print_lines<'a>(lines: impl Iterator<Item = (&'a str, &'a str)>) {
    let lines: Vec<(&str, &str)> = lines.collect();
    let width = lines.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    for (name, text) in lines {
        print_text(&format!("{}\n", format!("{name:width$}  {text}").trim_end()));
    }
}

/// Prints fields (a name, its text, and its JSON value) to standard output: in columns, or as one JSON object.
pub(crate) fn print_fields<N: AsRef<str>>(json: bool, fields: Vec<(N, String, Value)>) {
    if json {
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
