//! `amp`: what mixed precision buys, and what it takes.

mod commands;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use report::cli::CommonArgs;

/// Mixed precision: loss scalers, autocast, and what they buy
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
    /// Measure whole trainings, one in each precision
    Train(commands::train::Train),
    /// Measure one gradient in each precision, on a wider model
    Gradient(commands::gradient::GradientArgs),
    /// Train with one static scale after another, and with the dynamic scaler from both ends
    Sweep(commands::sweep::Sweep),
    /// Count the gradients that fp16 makes zero, by exponent and by scale
    Underflow(commands::underflow::Underflow),
    /// Show what number formats do to small numbers and long sums
    Formats(commands::formats::Formats),
    /// Measure what a loss scaler adds to a step of the optimizer
    Overhead(commands::overhead::Overhead),
    /// Measure how far autocast in bf16 is from the exact loss and gradients
    Numerics(commands::numerics::Numerics),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    report::cli::run(|| match &cli.command {
        Command::Train(arguments) => commands::train::run(&cli.common, arguments),
        Command::Gradient(arguments) => commands::gradient::run(&cli.common, arguments),
        Command::Sweep(arguments) => commands::sweep::run(&cli.common, arguments),
        Command::Underflow(arguments) => commands::underflow::run(&cli.common, arguments),
        Command::Formats(arguments) => commands::formats::run(&cli.common, arguments),
        Command::Overhead(arguments) => commands::overhead::run(&cli.common, arguments),
        Command::Numerics(arguments) => commands::numerics::run(&cli.common, arguments),
    })
}
