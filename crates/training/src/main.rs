//! `training`: trains language models.

mod commands;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use report::cli::CommonArgs;

/// Optimizers, schedules, losses, the training loop, crash-safe checkpoints
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    common: CommonArgs,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model
    Train(Box<commands::train::Train>),
    /// Measure whole trainings, one for each way of loading data
    Loading(commands::loading::Loading),
    /// Measure steps with planted inefficiencies on and off, and profile them
    Profile(commands::profile::ProfileArgs),
    /// Measure steps with all planted inefficiencies on, then with one repaired after another
    Repair(commands::profile::RepairArgs),
    /// Measure steps under plans of what each layer keeps, against what was foretold
    Activations(commands::activations::ActivationsArgs),
    /// Measure steps of the GPT-2-like model on given sizes
    Bench(commands::bench::Bench),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    report::cli::run(|| match &cli.command {
        Command::Train(arguments) => commands::train::run(&cli.common, arguments),
        Command::Loading(arguments) => commands::loading::run(&cli.common, arguments),
        Command::Profile(arguments) => commands::profile::run(&cli.common, arguments),
        Command::Repair(arguments) => commands::profile::run_repair(&cli.common, arguments),
        Command::Activations(arguments) => commands::activations::run(&cli.common, arguments),
        Command::Bench(arguments) => commands::bench::run(&cli.common, arguments),
    })
}
