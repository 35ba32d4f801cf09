//! `dataloading`: the cost of packing, sampling and loading, over one table of sizes.

pub mod lengths;
mod packing;
mod sampler;
mod synthetic;
pub mod texts;
mod throughput;

use clap::Subcommand;

use crate::driver::{Bench, Driver};

/// The group of figures to measure.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Measure padding and time of packing on one thread
    Pack(packing::Sizes),
    /// Measure the balanced sampler by the size of the data set
    Sampler(packing::Sizes),
    /// Count the lengths of texts' lines, and the padding of each batching strategy
    Lengths,
    /// Measure tokens per second of the whole loader, by strategy and workers
    Throughput(throughput::ThroughputArgs),
}

impl Verb {
    pub(crate) fn run(&self, driver: &Driver) -> anyhow::Result<()> {
        match self {
            Self::Pack(sizes) => driver.run("packing", |bench| packing::run(bench, sizes)),
            Self::Sampler(sizes) => driver.run("sampler", |bench| sampler::run(bench, sizes)),
            Self::Lengths => driver.run("lengths", lengths::run),
            Self::Throughput(arguments) => driver.run("loader", |bench| throughput::run(bench, arguments)),
        }
    }
}

/// How often a fast piece of work is repeated.
fn repeats(bench: &Bench) -> usize {
    bench.sized([3, 21, 21, 21])
}

/// Seconds of each of `repeats` runs, after one to warm up.
fn seconds<R>(repeats: usize, mut run: impl FnMut() -> R) -> Vec<f64> {
    std::hint::black_box(run());
    let sample = |_| {
        let began = std::time::Instant::now();
        let result = run();
        let seconds = began.elapsed().as_secs_f64();
        std::hint::black_box(result);
        seconds
    };
    (0..repeats).map(sample).collect()
}
