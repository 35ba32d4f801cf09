//! `lora`: a frozen model adapted, graded, and taken elsewhere.

mod commands;
mod program;

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
    /// Train an adapter on word problems
    Train(Box<commands::train::Train>),
    /// Grade a model's answers to word problems
    Eval(commands::eval::Eval),
    /// Let a model go on from a text
    Generate(commands::generate::Generate),
    /// Write an adapter into its model's weights
    Merge(commands::merge::Merge),
    /// Take an adapter out of a checkpoint, or write one again
    Export(commands::export::Export),
    /// Say what a model's or an adapter's folder holds
    Info(commands::info::Info),
    /// Measure a training step on a real model's shape, and foretell it
    Step(commands::step::Step),
    /// Measure how fast a real model's shape decodes
    Decode(commands::decode::Decode),
    /// Pretrain a small model on a small world, adapt it, and grade its answers
    Embedded(commands::embedded::Embedded),
    /// Read what PEFT wrote, and write for PEFT to read
    #[command(hide = true)]
    Interchange(commands::interchange::Interchange),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    report::cli::run(|| match &cli.command {
        Command::Train(arguments) => commands::train::run(&cli.common, arguments),
        Command::Eval(arguments) => commands::eval::run(&cli.common, arguments),
        Command::Generate(arguments) => commands::generate::run(&cli.common, arguments),
        Command::Merge(arguments) => commands::merge::run(&cli.common, arguments),
        Command::Export(arguments) => commands::export::run(&cli.common, arguments),
        Command::Info(arguments) => commands::info::run(&cli.common, arguments),
        Command::Step(arguments) => commands::step::run(&cli.common, arguments),
        Command::Decode(arguments) => commands::decode::run(&cli.common, arguments),
        Command::Embedded(arguments) => commands::embedded::run(&cli.common, arguments),
        Command::Interchange(arguments) => commands::interchange::run(&cli.common, arguments),
    })
}
