//! `planning`: the chosen plan of a training, compared with every other one.

mod choice;
mod sandbox;

use clap::Subcommand;
use report::cli::CommonArgs;

/// What is compared.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Train under budgets with the chosen plan, and with every other one
    Choice(choice::Choice),
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Choice(arguments) => choice::run(common, arguments),
    }
}
