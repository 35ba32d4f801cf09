//! `amp`: what mixed precision buys, and what it takes.

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
    /// Train with one static scale after another, and with the dynamic scaler from both ends
    Sweep(sweep::Sweep),
    /// Count the gradients that fp16 makes zero, by exponent and by scale
    Underflow(underflow::Underflow),
    /// Show what number formats do to small numbers and long sums
    Formats(formats::Formats),
    /// Measure what a loss scaler adds to a step of the optimizer
    Overhead(overhead::Overhead),
    /// Measure how far autocast in bf16 is from the exact loss and gradients
    Numerics(numerics::Numerics),
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Train(arguments) => train::run(common, arguments),
        Verb::Gradient(arguments) => gradient::run(common, arguments),
        Verb::Sweep(arguments) => sweep::run(common, arguments),
        Verb::Underflow(arguments) => underflow::run(common, arguments),
        Verb::Formats(arguments) => formats::run(common, arguments),
        Verb::Overhead(arguments) => overhead::run(common, arguments),
        Verb::Numerics(arguments) => numerics::run(common, arguments),
    }
}
