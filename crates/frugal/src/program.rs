//! The subcommands, and what they share.

pub(crate) mod adapter;
pub(crate) mod chat;
pub(crate) mod data;
pub(crate) mod doctor;
pub(crate) mod encoding;
pub(crate) mod end_card;
pub(crate) mod eval;
pub(crate) mod export;
pub(crate) mod figures;
pub(crate) mod finetune;
pub(crate) mod flags;
pub(crate) mod generate;
pub(crate) mod info;
pub(crate) mod kept;
pub(crate) mod launch;
pub(crate) mod merge;
pub(crate) mod model;
pub(crate) mod offload_folder;
pub(crate) mod output;
pub(crate) mod output_file;
pub(crate) mod output_folder;
pub(crate) mod plan;
pub(crate) mod problems;
pub(crate) mod ranks;
pub(crate) mod records;
pub(crate) mod report;
pub(crate) mod resume;
pub(crate) mod row_flags;
pub(crate) mod run_flags;
pub(crate) mod run_model;
pub(crate) mod run_plan;
pub(crate) mod run_record;
pub(crate) mod runs;
pub(crate) mod sampling;
pub(crate) mod saving;
pub(crate) mod settings;
pub(crate) mod shell;
pub(crate) mod train;
pub(crate) mod training;
pub(crate) mod unfinished;

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use frugal::run_folder::RunRecord;
use frugal::run_folder::origins::Origins;
use ranks::Ranks;
use tch::Device;

/// Heading of [`Common`]'s flags in a subcommand's help.
const COMMON: &str = "Common options";

/// Flags that every subcommand has.
#[derive(Args, Clone, Debug)]
pub(crate) struct Common {
    /// Where to compute: cpu, cuda or cuda:N [default: cpu]
    #[arg(long, global = true, help_heading = COMMON)]
    pub(crate) device: Option<String>,
    /// Seed of every random choice [default: 0]
    #[arg(long, global = true, help_heading = COMMON)]
    pub(crate) seed: Option<u64>,
    /// Append the measurements of each training step to FILE, as JSON lines
    #[arg(long, value_name = "FILE", global = true, help_heading = COMMON)]
    pub(crate) records: Option<PathBuf>,
    /// Print a machine-readable result on standard output
    #[arg(long, global = true, help_heading = COMMON)]
    pub(crate) json: bool,
    /// Print results and errors only: no progress, no notes
    #[arg(long, short, global = true, help_heading = COMMON)]
    pub(crate) quiet: bool,
    /// The ranks of a training that a launcher started.
    #[arg(skip)]
    pub(crate) ranks: Option<Ranks>,
    /// The long names of the flags that the command line gives.
    #[arg(skip)]
    pub(crate) given: Vec<String>,
    /// Where the values of the configuration come from.
    #[arg(skip)]
    pub(crate) origins: Origins,
    /// The record of the training whose configuration is used.
    #[arg(skip)]
    pub(crate) earlier: Option<Arc<RunRecord>>,
}

impl Common {
    /// The device.
    ///
    /// # Errors
    /// One that is not there.
    pub(crate) fn device(&self) -> anyhow::Result<Device> {
        Ok(runtime::device::select(self.device.as_deref().unwrap_or("cpu"))?)
    }

    /// The seed.
    pub(crate) fn seed(&self) -> u64 {
        self.seed.unwrap_or(0)
    }
}
