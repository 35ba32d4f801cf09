//! `frugal plan`: what fits, where the peak is, and what it costs. Reads no weights.

mod fit;
mod flops;
mod kv_cache;
mod memory;
mod model_args;
mod new_tokens;
mod parameters;
mod step;
mod step_args;
pub(crate) mod table;
mod time;

use clap::{Args, Subcommand};
use serde_json::Value;

use super::output::{print_line, print_text};
use crate::common_flags::Common;

#[derive(Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "\
Without a command, `frugal plan` compares the ways to run a step at this machine's measured rates, or at a GPU's.

Examples:
  frugal plan --model qwen2.5-7b --budget 10GiB
  frugal plan --model qwen2.5-7b --budget 10GiB --hardware rtx4090 --length 2048
  frugal plan --model qwen2.5-7b --method full --hardware h100 --ranks 32 --nodes 4 --network 368GB
  frugal plan fit --model path/to/config.json --budget 24GiB
  frugal plan memory --model qwen2.5-0.5b --method full --batch-size 8 --hardware rtx4090
  frugal plan flops --model llama-3-8b --length 8192
  frugal plan time --parameters 70B --tokens 15T --hardware h100 --ranks 1024"
)]
pub(crate) struct Plan {
    #[command(subcommand)]
    question: Option<Question>,
    #[command(flatten)]
    step: step::StepArgs,
}

/// The question.
#[derive(Subcommand)]
enum Question {
    /// The largest batch, the longest row and the largest model that fit a device
    Fit(fit::Fit),
    /// The memory of the chosen way to run a step, part by part
    Memory(memory::Memory),
    /// The FLOPs of a training step, product by product, and the error of 6·N·D
    Flops(flops::FlopsArgs),
    /// The memory of the KV cache in generation
    KvCache(kv_cache::KvCache),
    /// The time of a training from parameters and tokens, or the utilization from a measured time
    Time(time::Time),
    /// The parameters of a model, part by part
    Parameters(parameters::Parameters),
}

/// An answer, for people and for programs.
struct Answer {
    text: String,
    json: Value,
    /// The error with which the command ends after it, where nothing fits.
    failure: Option<anyhow::Error>,
}

impl Answer {
    fn new(text: String, json: Value) -> Self {
        Self { text, json, failure: None }
    }
}

pub(crate) fn run(common: &Common, arguments: &Plan) -> anyhow::Result<()> {
    let answer = match &arguments.question {
        None => return step::run(common, &arguments.step),
        Some(Question::Fit(arguments)) => arguments.answer(common)?,
        Some(Question::Memory(arguments)) => arguments.answer(common)?,
        Some(Question::Flops(arguments)) => arguments.answer()?,
        Some(Question::KvCache(arguments)) => arguments.answer()?,
        Some(Question::Time(arguments)) => arguments.answer()?,
        Some(Question::Parameters(arguments)) => arguments.answer()?,
    };
    if common.json {
        print_line(&answer.json);
    } else {
        print_text(&answer.text);
    }
    answer.failure.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests;
