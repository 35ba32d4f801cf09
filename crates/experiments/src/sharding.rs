//! `sharding`: trainings over ranks that divide optimizer state and gradients.

mod bench;
mod cost;
mod model;
mod rank;
mod timeline;

use clap::Subcommand;
use report::cli::CommonArgs;

/// What is measured.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Memory, transfers and time of one, two and four ranks, by ZeRO stage, and a timeline
    Cost(cost::Cost),
    /// Steps over two ranks, and their losses, for a comparison with another program
    Bench(bench::Bench),
    /// One of the ranks of `cost` and `bench`
    #[command(hide = true)]
    Rank(rank::Rank),
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Cost(arguments) => cost::run(common, arguments),
        Verb::Bench(arguments) => bench::run(common, arguments),
        Verb::Rank(arguments) => rank::run(arguments),
    }
}
