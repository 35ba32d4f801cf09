//! `offload`: models larger than the device, measured.

mod comparison;
mod difference;
mod equality;
mod folder;
mod large;
mod measured_model;
mod methods;
mod optimizer;
mod peaks;
mod predicted;
pub mod predicted_peaks;
mod spans;
mod timeline;
mod tokens;

use clap::Subcommand;
use report::cli::CommonArgs;

/// What is measured.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Measure every method against the resident model
    Methods(methods::Methods),
    /// Show the streams during a step
    Timeline(timeline::Timeline),
    /// Measure the tokens of a step at which loads hide behind compute
    Tokens(tokens::Tokens),
    /// Run a model larger than its memory budget, which is enforced
    Large(large::Large),
    /// Compare losses, gradients and weights of every method with the model's own
    Equality(equality::Equality),
    /// Train with the optimizer state on the host, and on the device
    Optimizer(optimizer::OptimizerArgs),
    /// Compare the predicted peak of a step with the measured one, over a table of combinations
    Peaks(peaks::Peaks),
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Methods(arguments) => methods::run(common, arguments),
        Verb::Timeline(arguments) => timeline::run(common, arguments),
        Verb::Tokens(arguments) => tokens::run(common, arguments),
        Verb::Large(arguments) => large::run(common, arguments),
        Verb::Equality(arguments) => equality::run(common, arguments),
        Verb::Optimizer(arguments) => optimizer::run(common, arguments),
        Verb::Peaks(arguments) => peaks::run(common, arguments),
    }
}
