//! `planning`: trainings of the program under budgets, and beside other programs.

mod busy;
mod choice;
mod held;
mod large;
mod sandbox;
mod weights;

use clap::Subcommand;

use crate::driver::Driver;

/// The predictions to compare with measurements.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Train beside a process on every core, under each way in which threads can wait
    Busy(busy::Busy),
    /// Train under budgets with the chosen plan, and with every other one
    Choice(choice::Choice),
    /// Train at the least budgets that are named, and sample the memory of the process from outside
    Held,
    /// Train a model that is larger than its budget; at full and paper Qwen2.5-7B's shape within 4 GiB, and 15 GB on the disk
    Large(large::Large),
    /// Train all weights in fp32 and, under each way in which they can take small updates, in bf16
    Weights,
}

impl Verb {
    pub(crate) fn run(&self, driver: &Driver) -> anyhow::Result<()> {
        let driver = driver.on_cpu();
        match self {
            Self::Busy(arguments) => driver.run("busy-machine", |bench| busy::run(bench, arguments)),
            Self::Choice(arguments) => {
                let name = if arguments.ranks > 1 { "plan-choice-ranks" } else { "plan-choice" };
                driver.run(name, |bench| choice::run(bench, arguments))
            }
            Self::Held => driver.run("held-memory", held::run),
            Self::Large(arguments) => driver.run("plan-large", |bench| large::run(bench, arguments)),
            Self::Weights => driver.run("bf16-weights", weights::run),
        }
    }
}
