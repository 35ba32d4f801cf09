//! `fused-ce`: time and memory of a loss that never holds all logits.

mod attention;
pub mod baselines;
mod bench;
mod exact;
mod memory;
mod numerics;
mod shapes;
mod sizes;
mod step_memory;
mod train;
mod training;

use clap::Subcommand;
use report::cli::CommonArgs;

/// What is measured.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Measure time and memory of one forward and backward, implementation by implementation
    Bench(bench::Bench),
    /// Measure the error of each implementation's loss and gradients
    Numerics(numerics::Numerics),
    /// Train the same model with each loss
    Train(train::Train),
    /// Measure time and memory of attention over the length
    Attention(attention::Attention),
    /// Show the memory of a training step, part by part
    Memory(memory::Memory),
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Bench(arguments) => bench::run(common, arguments),
        Verb::Numerics(arguments) => numerics::run(common, arguments),
        Verb::Train(arguments) => train::run(common, arguments),
        Verb::Attention(arguments) => attention::run(common, arguments),
        Verb::Memory(arguments) => memory::run(common, arguments),
    }
}
