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

use crate::driver::Driver;

/// The group of figures to measure.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Measure time and memory of one forward and backward, implementation by implementation
    Bench(bench::BenchArgs),
    /// Measure the error of each implementation's loss and gradients
    Numerics(numerics::Numerics),
    /// Train the same model with each loss
    Train(train::Train),
    /// Measure time and memory of attention over the length
    Attention,
    /// Show the memory of a training step, part by part
    Memory,
}

impl Verb {
    pub(crate) fn run(&self, driver: &Driver) -> anyhow::Result<()> {
        match self {
            Self::Bench(arguments) => driver.run("fused-ce", |bench| bench::run(bench, arguments)),
            Self::Numerics(arguments) => {
                driver.run("fused-ce-numerics", |bench| numerics::run(bench, arguments))
            }
            Self::Train(arguments) => driver.run("fused-ce-training", |bench| train::run(bench, arguments)),
            Self::Attention => driver.run("attention-length", attention::run),
            Self::Memory => driver.run("fused-ce-memory", memory::run),
        }
    }
}
