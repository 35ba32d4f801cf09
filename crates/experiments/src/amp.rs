//! `amp`: benefits and costs of mixed precision.

mod demonstration;
mod exact;
mod formats;
mod fp16_adam;
mod gradient;
mod gradient_time;
mod gradients;
mod numerics;
mod overhead;
mod scaler_step;
mod setup;
mod sizes;
mod sweep;
mod train;
mod training;
mod underflow;

use clap::Subcommand;

use crate::corpus::DataArgs;
use crate::driver::Driver;

/// The group of figures to measure.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Measure whole trainings, one in each precision
    Train(train::Train),
    /// Measure one gradient in each precision, on a wider model
    Gradient(gradient::GradientArgs),
    /// Train with static scales, and with the dynamic scaler from very small and very large initial scales
    Sweep(DataArgs),
    /// Count the gradients that underflow in fp16, by exponent and by scale
    Underflow(DataArgs),
    /// Show the rounding of small numbers and long sums in each number format
    Formats,
    /// Measure the overhead of a loss scaler in an optimizer step
    Overhead(overhead::Overhead),
    /// Measure the error of the loss and gradients under autocast in bf16
    Numerics(numerics::Numerics),
}

impl Verb {
    pub(crate) fn run(&self, driver: &Driver) -> anyhow::Result<()> {
        match self {
            Self::Train(arguments) => driver.run("amp-training", |bench| train::run(bench, arguments)),
            Self::Gradient(arguments) => driver.run("amp-gradient", |bench| gradient::run(bench, arguments)),
            Self::Sweep(data) => driver.run("amp-sweep", |bench| sweep::run(bench, data)),
            Self::Underflow(data) => driver.run("amp-underflow", |bench| underflow::run(bench, data)),
            Self::Formats => driver.one_size().on_cpu().run("amp-formats", formats::run),
            Self::Overhead(arguments) => {
                driver.one_size().run("amp-overhead", |bench| overhead::run(bench, arguments))
            }
            Self::Numerics(arguments) => {
                driver.one_size().on_cpu().run("amp-numerics", |bench| numerics::run(bench, arguments))
            }
        }
    }
}
