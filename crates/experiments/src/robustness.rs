//! `robustness`: the program killed at random instants, with system calls that fail, and over many steps.

mod allocations;
mod faults;
mod hub;
mod kills;
mod recovery;
mod scripts;
mod soak;
mod work;

use clap::Subcommand;

use crate::driver::Driver;

/// The group of failures to inject.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Kill commands at random instants and run them again
    Kills(kills::Kills),
    /// Make system calls of commands fail one after the other, and run them again
    Faults(faults::Faults),
    /// Refuse each allocation of a training step in turn
    Allocations,
    /// Run many steps and watch what the process holds
    Soak,
}

impl Verb {
    pub(crate) fn run(&self, driver: &Driver) -> anyhow::Result<()> {
        let driver = driver.on_cpu();
        match self {
            Self::Kills(arguments) => driver.run("kills", |bench| kills::run(bench, arguments)),
            Self::Faults(arguments) => driver.run("faults", |bench| faults::run(bench, arguments)),
            Self::Allocations => driver.run("allocations", allocations::run),
            Self::Soak => driver.run("soak", soak::run),
        }
    }
}
