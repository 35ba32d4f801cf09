//! `lora`: steps and decoding on real shapes, what is learned on embedded data, and files exchanged with PEFT.

mod decode;
mod embedded;
mod interchange;
mod shape;
mod step;

use clap::Subcommand;
use report::cli::CommonArgs;

/// What is measured.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Measure a training step on a real model's shape, and predict it
    Step(step::Step),
    /// Measure how fast a real model's shape decodes
    Decode(decode::Decode),
    /// Pretrain a small model on embedded data, adapt it, and grade its answers
    Embedded(embedded::Embedded),
    /// Read what PEFT wrote, and write for PEFT to read
    #[command(hide = true)]
    Interchange(interchange::Interchange),
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Step(arguments) => step::run(common, arguments),
        Verb::Decode(arguments) => decode::run(common, arguments),
        Verb::Embedded(arguments) => embedded::run(common, arguments),
        Verb::Interchange(arguments) => interchange::run(common, arguments),
    }
}
