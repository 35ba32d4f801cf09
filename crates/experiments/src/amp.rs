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
use report::cli::CommonArgs;

/// What is measured.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Measure whole trainings, one in each precision
    Train(train::Train),
    /// Measure one gradient in each precision, on a wider model
    Gradient(gradient::GradientArgs),
    /// Train with static scales, and with the dynamic scaler from very small and very large initial scales
    Sweep(sweep::Sweep),
    /// Count the gradients that underflow in fp16, by exponent and by scale
    Underflow(underflow::Underflow),
    /// Show the rounding of small numbers and long sums in each number format
    Formats,
    /// Measure the overhead of a loss scaler in an optimizer step
    Overhead(overhead::Overhead),
    /// Measure the error of the loss and gradients under autocast in bf16
    Numerics(numerics::Numerics),
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Train(arguments) => train::run(common, arguments),
        Verb::Gradient(arguments) => gradient::run(common, arguments),
        Verb::Sweep(arguments) => sweep::run(common, arguments),
        Verb::Underflow(arguments) => underflow::run(common, arguments),
        Verb::Formats => formats::run(common),
        Verb::Overhead(arguments) => overhead::run(common, arguments),
        Verb::Numerics(arguments) => numerics::run(common, arguments),
    }
}
