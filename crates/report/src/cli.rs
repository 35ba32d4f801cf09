//! What the command lines of all binaries share.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde::Deserialize;

use crate::record::{RecordWriter, RecordsError};

/// Flags that every binary has.
#[derive(Args, Clone, Debug)]
pub struct CommonArgs {
    /// Where to compute: cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu", global = true)]
    pub device: String,
    /// Seed of every random choice
    #[arg(long, default_value_t = 0, global = true)]
    pub seed: u64,
    /// Append each measurement to FILE as a JSON line
    #[arg(long, value_name = "FILE", global = true)]
    pub records: Option<PathBuf>,
    /// Print a machine-readable result on standard output
    #[arg(long, global = true)]
    pub json: bool,
}

impl CommonArgs {
    /// Opens the records file, where one was asked for.
    pub fn open_records(&self) -> Result<Option<RecordWriter>, RecordsError> {
        self.records.as_deref().map(RecordWriter::append).transpose()
    }
}

/// How large an experiment is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// Seconds: shows that everything runs
    Smoke,
    /// Minutes on two cores with 8 GiB
    #[default]
    Laptop,
    /// The assignments' own sizes; wants a GPU
    Paper,
}

/// Runs a binary's work. An error is printed in one line with its whole cause chain, and becomes exit status 1
/// (clap has ended the process with 2 on a usage error before).
pub fn run(work: impl FnOnce() -> anyhow::Result<()>) -> ExitCode {
    match work() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
