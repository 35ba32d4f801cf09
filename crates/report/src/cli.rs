//! Command-line flags and error handling that all binaries share.

use std::borrow::Cow;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde::Deserialize;

use crate::record::{RecordWriter, RecordsError};

/// The flags of every binary.
#[derive(Args, Clone, Debug)]
pub struct CommonArgs {
    /// Device: cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu", global = true)]
    pub device: String,
    /// Random seed
    #[arg(long, default_value_t = 0, global = true)]
    pub seed: u64,
    /// Append each measurement to FILE as a JSON line
    #[arg(long, value_name = "FILE", global = true)]
    pub records: Option<PathBuf>,
    /// Print the results to standard output as JSON lines
    #[arg(long, global = true)]
    pub json: bool,
}

impl CommonArgs {
    /// Opens the records file if `--records` names one.
    pub fn open_records(&self) -> Result<Option<RecordWriter>, RecordsError> {
        self.records.as_deref().map(RecordWriter::append).transpose()
    }
}

/// The size of an experiment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// Seconds; checks that everything runs
    Smoke,
    /// All experiments in 10 minutes on two cores with 8 GiB
    #[default]
    Laptop,
    /// Hours on a CPU: sizes as near to the assignments' as 24 GiB allow
    Full,
    /// The assignments' sizes; needs a GPU
    Paper,
}

impl Scale {
    /// Returns the name on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Smoke => "smoke",
            Self::Laptop => "laptop",
            Self::Full => "full",
            Self::Paper => "paper",
        }
    }
}

/// An error that ends a program with a status of its own, such as 3 where nothing fits the memory.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The exit status.
    pub status: u8,
    /// The problem, and the remedy.
    pub message: String,
}

impl Failure {
    /// Returns the exit status of a program that ends with an error: 1, or that of a [`Failure`].
    pub fn status_of(error: &anyhow::Error) -> u8 {
        error.downcast_ref::<Self>().map_or(1, |failure| failure.status)
    }
}

/// Returns the text without the control characters with which it could command a terminal: all but line breaks and tabs.
///
/// ```
/// assert_eq!(report::cli::without_controls("two\twords\n"), "two\twords\n");
/// assert_eq!(report::cli::without_controls("\x1b[2Jgone\r\n"), "[2Jgone\n");
/// ```
pub fn without_controls(text: &str) -> Cow<'_, str> {
    let commands = |char: char| char.is_control() && !matches!(char, '\n' | '\t');
    if text.contains(commands) { text.replace(commands, "").into() } else { text.into() }
}

/// Returns the line that a person reads of an error: its whole cause chain, without control characters, which may come from data and from
/// names of files.
pub fn error_line(error: &anyhow::Error) -> String {
    without_controls(&format!("error: {error:#}")).into_owned()
}

/// Runs a binary's work. Prints an error as [`error_line`] and returns the status of [`Failure::status_of`] (on a usage error clap exits
/// with 2 before).
pub fn run(work: impl FnOnce() -> anyhow::Result<()>) -> ExitCode {
    match work() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}", error_line(&error));
            ExitCode::from(Failure::status_of(&error))
        }
    }
}
