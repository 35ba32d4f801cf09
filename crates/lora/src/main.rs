//! `lora`: what is measured of low-rank adaptation.

mod commands;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use report::cli::CommonArgs;

/// Low-rank adaptation of a frozen model, in PEFT's files
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
    /// Measure a training step on a real model's shape, and foretell it
    Step(commands::step::Step),
    /// Measure how fast a real model's shape decodes
    Decode(commands::decode::Decode),
    /// Read what PEFT wrote, and write for PEFT to read
    #[command(hide = true)]
    Interchange(commands::interchange::Interchange),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    report::cli::run(|| match &cli.command {
        Command::Step(arguments) => commands::step::run(&cli.common, arguments),
        Command::Decode(arguments) => commands::decode::run(&cli.common, arguments),
        Command::Interchange(arguments) => commands::interchange::run(&cli.common, arguments),
    })
}
