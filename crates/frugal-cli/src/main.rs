//! `frugal`: trains and fine-tunes language models.

mod chat;
mod common_flags;
mod data;
mod doctor;
mod download_bar;
mod eval;
mod export;
mod finetune;
mod flags;
mod folder;
mod generate;
mod info;
mod launch;
mod merge;
mod output;
mod plan;
mod questions;
mod resume;
mod run;
mod runs;
mod shell;
mod train;

/// Products pack their operands into blocks that live for the product alone, between small blocks that a graph keeps. In glibc's heap each would
/// leave a hole, 100 MiB in a step of 135 million parameters, which a budget cannot count.
#[global_allocator]
static GLOBAL: mimalloc::MiMalloc = mimalloc::MiMalloc;

// People train beside a browser.
runtime::bound_spinning!();

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use report::cli::without_controls;

use common_flags::Common;

/// Train and fine-tune language models on the memory at hand
#[derive(Parser)]
#[command(name = "frugal", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    common: Common,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model from scratch
    #[command(visible_alias = "pretrain")]
    Train(Box<train::Train>),
    /// Fine-tune a model: LoRA, DoRA, or all of its weights
    Finetune(Box<finetune::Finetune>),
    /// Resume a training run from its output folder
    Resume(resume::Resume),
    /// Measure a model: its loss on data, its answers to questions or to GSM8K
    Eval(Box<eval::Eval>),
    /// Talk with a model through its chat template
    Chat(chat::Chat),
    /// Generate text from a prompt
    Generate(generate::Generate),
    /// Merge an adapter into its base model's weights
    Merge(merge::Merge),
    /// Export a model or an adapter: PEFT, Hugging Face, NF4, GGUF or Ollama
    Export(Box<export::Export>),
    /// Show, measure or check fine-tuning data as the model reads it
    Data(Box<data::Data>),
    /// List, describe and compare training runs
    Runs(runs::Runs),
    /// Describe a training run's output folder, a model or an adapter
    Info(info::Info),
    /// Predict what fits, the peak memory and the time of a step; reads no weights
    Plan(Box<plan::Plan>),
    /// Print a shell completion script
    Completions(shell::Completions),
    /// Write manual pages
    Man(shell::Man),
    /// Start a program as several ranks on this machine, as torchrun does
    Launch(launch::Launch),
    /// Show this machine's libtorch, devices, rates, memory, disk and access to the hub
    Doctor(doctor::Doctor),
}

/// Reads a command line; its first word is the program.
///
/// # Errors
/// Wrong arguments; a request for help or for the version.
fn parse(words: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Cli, clap::Error> {
    let mut command = Cli::command();
    let words: Vec<OsString> = words.into_iter().map(Into::into).collect();
    let resumes = words.get(1).is_some_and(|word| word == "resume");
    let given = words.clone();
    let matches = command.try_get_matches_from_mut(words).map_err(|error| {
        let Some(flag) = unknown_flag(&error) else { return in_words(error) };
        let given = given.iter().skip(1).filter_map(|word| word.to_str());
        let text = match flags::key_of(&flag).filter(|_| resumes) {
            Some(key) => {
                Some(format!("{flag}: a run that is resumed has its own; change it with --set {key}=VALUE"))
            }
            None => flags::other_names::remedy(&Cli::command(), given, &flag)
                .map(|remedy| format!("unexpected argument '{flag}': {remedy}")),
        };
        text.map_or(error, |text| clap::Error::raw(ErrorKind::UnknownArgument, text + "\n"))
    })?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

/// The flag that a command does not have, where that is the error.
fn unknown_flag(error: &clap::Error) -> Option<String> {
    match (error.kind(), error.get(ContextKind::InvalidArg)?) {
        (ErrorKind::UnknownArgument, ContextValue::String(flag)) => Some(flag.clone()),
        _ => None,
    }
}

/// Replaces Rust's words for a number that cannot be read.
fn in_words(error: clap::Error) -> clap::Error {
    const WORDS: [(&str, &str); 6] = [
        (": invalid float literal", ": expected a number"),
        (": cannot parse float from empty string", ": expected a number"),
        (": invalid digit found in string", ": expected a whole number"),
        (": cannot parse integer from empty string", ": expected a whole number"),
        (": number too large to fit in target type", ": the number is too large"),
        (": number too small to fit in target type", ": the number is too small"),
    ];
    let text = error.to_string();
    match WORDS.iter().find(|(rust, _)| error.kind() == ErrorKind::ValueValidation && text.contains(rust)) {
        Some((rust, words)) => {
            let text = text.replace(rust, words);
            clap::Error::raw(error.kind(), text.strip_prefix("error: ").unwrap_or(&text))
        }
        None => error,
    }
}

/// Runs a command.
///
/// # Errors
/// Any error of the command.
fn run(cli: &Cli) -> anyhow::Result<()> {
    match &cli.command {
        Command::Train(arguments) => train::run(&cli.common, arguments).map_err(flags::named),
        Command::Finetune(arguments) => finetune::run(&cli.common, arguments).map_err(flags::named),
        Command::Resume(arguments) => resume::run(&cli.common, arguments).map_err(flags::named),
        Command::Eval(arguments) => eval::run(&cli.common, arguments),
        Command::Chat(arguments) => chat::run(&cli.common, arguments),
        Command::Generate(arguments) => generate::run(&cli.common, arguments),
        Command::Merge(arguments) => merge::run(&cli.common, arguments),
        Command::Export(arguments) => export::run(&cli.common, arguments),
        Command::Data(arguments) => data::run(&cli.common, arguments),
        Command::Runs(arguments) => runs::run(&cli.common, arguments),
        Command::Info(arguments) => info::run(&cli.common, arguments),
        Command::Plan(arguments) => plan::run(&cli.common, arguments).map_err(flags::named),
        Command::Completions(arguments) => shell::completions(arguments),
        Command::Man(arguments) => shell::man(&cli.common, arguments),
        Command::Launch(arguments) => launch::run(&cli.common, arguments),
        Command::Doctor(arguments) => doctor::run(&cli.common, arguments),
    }
}

fn main() -> ExitCode {
    runtime::memory::limit_kernel_caches();
    let cli = match parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    report::cli::run(|| {
        files::mapped::report_shortened_files()?;
        run(&cli)
            .and_then(|()| output::finish())
            .inspect_err(run::ranks::report_failure)
            .map_err(run::ranks::with_status)
    })
}

/// Prints what a wrong command line, or the request for help or the version, comes to.
fn usage(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    // Control characters may come from names of files that a shell put into the command line.
    let is_plain = error.exit_code() == 0 || without_controls(&text) == text;
    let printed = match is_plain {
        true => error.print().and_then(|()| std::io::stdout().flush()),
        false => std::io::stderr().write_all(without_controls(&text).as_bytes()),
    };
    match printed {
        Err(cause) if error.exit_code() == 0 && cause.kind() != std::io::ErrorKind::BrokenPipe => {
            eprintln!("error: standard output cannot be written: {cause}");
            ExitCode::FAILURE
        }
        _ => u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from),
    }
}

#[cfg(test)]
mod tests;
