//! The flags of a run as a person follows it.

use clap::Args;
use frugal::Config;
use frugal::config::Given;

use crate::program::flags::{DATA, put, put_some};

const RUN: &str = "Run";

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct RunArgs {
    /// Set a value of the configuration by its key, such as optimizer.lr=1e-4; may be given several times. Overrides the file, and is
    /// overridden by flags
    #[arg(long, value_name = "KEY=VALUE", help_heading = RUN)]
    set: Vec<String>,
    /// Stop after N evaluations in a row that are no better than the best [default: make all steps]
    #[arg(long, value_name = "N", help_heading = RUN)]
    patience: Option<u64>,
    /// Skip the evaluation before the first step
    #[arg(long, help_heading = RUN)]
    no_baseline: bool,
    /// Number of validation rows whose answers before and after are shown at the end; 0 for none [default: 5]
    #[arg(long, value_name = "N", help_heading = RUN)]
    samples: Option<usize>,
    /// Share of the rows to hold out for validation where the data has no validation split: 1 row at least and 1,000 at most, none of
    /// fewer than 50; 0 for none [default: 0.02]
    #[arg(long, value_name = "SHARE", help_heading = DATA)]
    held_out: Option<f64>,
}

impl RunArgs {
    /// The configuration with the values that `--set` names.
    ///
    /// # Errors
    /// A key that is unknown, or a value that is not of its type.
    pub(crate) fn set(&self, config: Config) -> anyhow::Result<Config> {
        self.set.iter().try_fold(config, |config, assignment| {
            config.with(assignment).map_err(|error| anyhow::anyhow!("--set {error}"))
        })
    }

    /// Takes the values that `--set` names.
    ///
    /// # Errors
    /// As [`RunArgs::set`].
    pub(crate) fn assign(&self, given: &mut Given) -> anyhow::Result<()> {
        self.set.iter().try_for_each(|assignment| {
            given.assign(assignment).map_err(|error| anyhow::anyhow!("--set {error}"))
        })
    }

    /// Overrides the configuration's values by the flags that were given.
    pub(crate) fn apply(&self, config: &mut Config) {
        let training = &mut config.training;
        put_some(&mut training.patience, self.patience);
        put(&mut training.samples, self.samples);
        training.baseline &= !self.no_baseline;
        put(&mut config.data.held_out, self.held_out);
    }

    /// The keys that `--set` names.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        self.set.iter().filter_map(|assignment| Some(assignment.split_once('=')?.0.trim()))
    }
}
