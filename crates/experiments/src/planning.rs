//! `planning`: the plan that a training chooses, beside every other one.

mod choice;
mod place;

use clap::Subcommand;
use report::cli::CommonArgs;

/// What is compared.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Train under budgets: in the chosen way, and in every other one
    Choice(choice::Choice),
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Choice(arguments) => choice::run(common, arguments),
    }
}
