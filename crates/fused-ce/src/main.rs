//! `fused-ce`: what it saves to never hold all logits.

mod commands;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use report::cli::CommonArgs;

/// The output projection and the cross-entropy as one operation that never holds all logits
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
    /// Measure time and memory of one forward and backward, rung by rung
    Bench(commands::bench::Bench),
    /// Measure how far each rung is from the exact loss and gradients
    Numerics(commands::numerics::Numerics),
    /// Train the same model with each loss
    Train(commands::train::Train),
    /// Show where the memory of a training step goes
    Memory(commands::memory::Memory),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    report::cli::run(|| match &cli.command {
        Command::Bench(arguments) => commands::bench::run(&cli.common, arguments),
        Command::Numerics(arguments) => commands::numerics::run(&cli.common, arguments),
        Command::Train(arguments) => commands::train::run(&cli.common, arguments),
        Command::Memory(arguments) => commands::memory::run(&cli.common, arguments),
    })
}
