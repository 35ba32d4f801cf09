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
use report::cli::CommonArgs;

/// What is tried.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Kill commands at random instants and run them again
    Kills(kills::Kills),
    /// Make system calls of commands fail one after the other, and run them again
    Faults(faults::Faults),
    /// Refuse each allocation of a training step in turn
    Allocations(allocations::Allocations),
    /// Run many steps and watch what the process holds
    Soak(soak::Soak),
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Kills(arguments) => kills::run(common, arguments),
        Verb::Faults(arguments) => faults::run(common, arguments),
        Verb::Allocations(arguments) => allocations::run(common, arguments),
        Verb::Soak(arguments) => soak::run(common, arguments),
    }
}
