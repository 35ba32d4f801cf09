//! `accounting`: parameters, FLOPs, bytes and training time of language models, on paper.

mod experiment;
mod sections;

use clap::Subcommand;
use report::cli::CommonArgs;

/// What is computed.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Compute the records of the report's sections about accounting
    Experiment(experiment::Experiment),
}

pub(crate) fn run(common: &CommonArgs, Verb::Experiment(arguments): &Verb) -> anyhow::Result<()> {
    experiment::run(common, arguments)
}
