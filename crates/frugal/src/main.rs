//! `frugal`: trains and fine-tunes language models.

mod program;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use report::cli::CommonArgs;

/// Train and fine-tune language models on the memory at hand
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
    /// Fine-tune a model with adapters
    Finetune(Box<program::finetune::Finetune>),
    /// Grade a model's answers to GSM8K
    Eval(program::eval::Eval),
    /// Generate text from a prompt
    Generate(program::generate::Generate),
    /// Merge an adapter into its model's weights
    Merge(program::merge::Merge),
    /// Export the adapter of a checkpoint, or convert an adapter
    Export(program::export::Export),
    /// Describe a model's or an adapter's folder
    Info(program::info::Info),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    report::cli::run(|| match &cli.command {
        Command::Finetune(arguments) => program::finetune::run(&cli.common, arguments),
        Command::Eval(arguments) => program::eval::run(&cli.common, arguments),
        Command::Generate(arguments) => program::generate::run(&cli.common, arguments),
        Command::Merge(arguments) => program::merge::run(&cli.common, arguments),
        Command::Export(arguments) => program::export::run(&cli.common, arguments),
        Command::Info(arguments) => program::info::run(&cli.common, arguments),
    })
}
