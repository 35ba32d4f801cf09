//! `sharding`: trainings over ranks that divide optimizer state and gradients.

mod bench;
mod cost;
mod links;
mod machines;
mod model;
mod rank;
mod rows;
mod timeline;

use clap::Subcommand;

use crate::driver::Driver;

/// The group of figures to measure.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Memory, transfers and time of one, two and four ranks, by ZeRO stage, and a timeline
    Cost(cost::CostArgs),
    /// Rows of tokens that ranks divide among them
    Rows(rows::RowsArgs),
    /// Steps over two ranks, and their losses, for a comparison with another program
    Bench(bench::BenchArgs),
    /// Steps over two machines whose cable has a limited rate, and the bytes on it
    Links(links::LinksArgs),
    /// A rank of the others
    #[command(hide = true)]
    Rank(rank::Rank),
}

impl Verb {
    pub(crate) fn run(&self, driver: &Driver) -> anyhow::Result<()> {
        match self {
            Self::Cost(arguments) => driver.run("sharding", |bench| cost::run(bench, arguments)),
            Self::Rows(arguments) => driver.run("sequence-parallel", |bench| rows::run(bench, arguments)),
            Self::Bench(arguments) => {
                driver.one_size().run("sharding-bench", |bench| bench::run(bench, arguments))
            }
            Self::Links(arguments) => {
                driver.one_size().run("sharding-links", |bench| links::run(bench, arguments))
            }
            Self::Rank(arguments) => rank::run(arguments),
        }
    }
}
