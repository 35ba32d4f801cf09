//! `offload`: models larger than the device, planned, measured and run.

mod commands;
mod program;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use report::cli::CommonArgs;

/// Layers, gradients and optimizer state that live elsewhere than they are used
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
    /// Say what of a model fits a budget, and how long a step takes
    Plan(commands::plan::PlanArgs),
    /// Let a model go on from a text, its layers elsewhere
    Generate(commands::generate::Generate),
    /// Measure every method against the model that is resident
    Methods(commands::methods::Methods),
    /// Show what the lanes do in a step
    Timeline(commands::timeline::Timeline),
    /// Measure from how many tokens on loading hides behind compute
    Tokens(commands::tokens::Tokens),
    /// Run a model larger than its budget, and hold it to that
    Large(commands::large::Large),
    /// Compare losses, gradients and weights of every method with the model's own
    Equality(commands::equality::Equality),
    /// Train with the optimizer's state on the host, and without
    Optimizer(commands::optimizer::OptimizerArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    report::cli::run(|| match &cli.command {
        Command::Plan(arguments) => commands::plan::run(&cli.common, arguments),
        Command::Generate(arguments) => commands::generate::run(&cli.common, arguments),
        Command::Methods(arguments) => commands::methods::run(&cli.common, arguments),
        Command::Timeline(arguments) => commands::timeline::run(&cli.common, arguments),
        Command::Tokens(arguments) => commands::tokens::run(&cli.common, arguments),
        Command::Large(arguments) => commands::large::run(&cli.common, arguments),
        Command::Equality(arguments) => commands::equality::run(&cli.common, arguments),
        Command::Optimizer(arguments) => commands::optimizer::run(&cli.common, arguments),
    })
}
