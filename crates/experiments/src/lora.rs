//! `lora`: steps and decoding on real shapes, a training on embedded data, and files exchanged with PEFT.

mod decode;
mod embedded;
mod families;
mod interchange;
mod parameters;
mod step;

use clap::Subcommand;
use report::cli::CommonArgs;

/// What is measured.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Measure a training step on a real model's shape, and compare it with the prediction
    Step(step::Step),
    /// Measure tokens per second of decoding on a real model's shape
    Decode(decode::Decode),
    /// Count the parameters of Qwen2.5-0.5B with the assignment's adapters
    Parameters,
    /// Pretrain a small model on embedded data, adapt it, and grade its answers
    Embedded(embedded::Embedded),
    /// Exchange adapter files with PEFT
    #[command(hide = true)]
    Interchange(interchange::Interchange),
    /// Compare models that transformers made of every family
    #[command(hide = true)]
    Families(families::Families),
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Step(arguments) => step::run(common, arguments),
        Verb::Decode(arguments) => decode::run(common, arguments),
        Verb::Parameters => parameters::run(common),
        Verb::Embedded(arguments) => embedded::run(common, arguments),
        Verb::Interchange(arguments) => interchange::run(common, arguments),
        Verb::Families(arguments) => families::run(common, arguments),
    }
}
