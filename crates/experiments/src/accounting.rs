//! `accounting`: parameters, FLOPs, bytes and training time of language models, on paper.

mod experiment;
mod float_format;
mod lecture;
mod number_limits;
mod sections;

use clap::Subcommand;

use crate::driver::Driver;

/// The group of figures to compute.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Compute the records of the report's sections about accounting
    Experiment(experiment::Experiment),
    /// Execute each cell of CS336's second lecture; at scale full and above, its large product too
    Lecture,
}

impl Verb {
    pub(crate) fn run(&self, driver: &Driver) -> anyhow::Result<()> {
        match self {
            Self::Experiment(arguments) => experiment::run(&driver.common, driver.scale, arguments),
            Self::Lecture => driver.run("accounting-lecture", lecture::run),
        }
    }
}
