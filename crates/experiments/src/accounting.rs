//! `accounting`: parameters, FLOPs, bytes and training time of language models, on paper.

mod experiment;
mod lecture;
mod sections;

use clap::Subcommand;
use report::cli::{CommonArgs, Scale};

/// What is computed.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Compute the records of the report's sections about accounting
    Experiment(experiment::Experiment),
    /// Execute each cell of CS336's second lecture
    Lecture {
        /// At scale full and above, the lecture's large product too
        #[arg(long, value_enum, default_value_t)]
        scale: Scale,
    },
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Experiment(arguments) => experiment::run(common, arguments),
        Verb::Lecture { scale } => lecture::run(common, *scale),
    }
}
