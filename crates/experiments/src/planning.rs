//! `planning`: trainings of the program under budgets, and beside other programs.

mod busy;
mod choice;
mod held;
mod large;
mod sandbox;
mod weights;

use clap::Subcommand;
use report::cli::CommonArgs;

/// What is compared.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Train beside a process on every core, under each way in which threads can wait
    Busy(busy::Busy),
    /// Train under budgets with the chosen plan, and with every other one
    Choice(choice::Choice),
    /// Train at the least budgets that are named, and sample the memory of the process from outside
    Held(held::Held),
    /// Train a model that is larger than its budget
    Large(large::Large),
    /// Train all weights in fp32 and, under each way in which they can take small updates, in bf16
    Weights(weights::Weights),
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Busy(arguments) => busy::run(common, arguments),
        Verb::Choice(arguments) => choice::run(common, arguments),
        Verb::Held(arguments) => held::run(common, arguments),
        Verb::Large(arguments) => large::run(common, arguments),
        Verb::Weights(arguments) => weights::run(common, arguments),
    }
}
