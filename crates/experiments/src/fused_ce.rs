//! `fused-ce`: what it saves to never hold all logits.

mod bench;
mod exact;
pub mod ladder;
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
    /// Measure how far each implementation is from the exact loss and gradients
    Numerics(numerics::Numerics),
    /// Train the same model with each loss
    Train(train::Train),
    /// Show where the memory of a training step goes
    Memory(memory::Memory),
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Bench(arguments) => bench::run(common, arguments),
        Verb::Numerics(arguments) => numerics::run(common, arguments),
        Verb::Train(arguments) => train::run(common, arguments),
        Verb::Memory(arguments) => memory::run(common, arguments),
    }
}
