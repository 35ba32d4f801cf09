//! `offload`: models larger than the device, measured.

mod comparison;
mod difference;
mod equality;
mod experts;
mod folder;
mod large;
mod long_context;
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

use crate::driver::Driver;

/// The group of figures to measure.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Measure every method against the resident model
    Methods(methods::MethodsArgs),
    /// Show the streams during a step
    Timeline(timeline::Timeline),
    /// Measure the tokens of a step at which loads hide behind compute
    Tokens(tokens::Tokens),
    /// Stream the experts of a mixture from files, over the share of them that memory has room for; at scale paper all of Qwen3-30B-A3B's
    /// shape, 60 GB on the disk
    Experts(experts::Experts),
    /// Run a model larger than its memory budget, which is enforced; at scale paper all of Qwen2.5-7B, 13 GB on the disk
    Large(large::Large),
    /// Run forward and backward over one long sequence, with weights, gradients and layer inputs on the host; at scale paper Llama-3-8B's
    /// shape over 32,768 and 131,072 tokens, on a GPU
    LongContext(long_context::LongContext),
    /// Compare losses, gradients and weights of every method with the model's own
    Equality(equality::Equality),
    /// Train with the optimizer state on the host, and on the device
    Optimizer(optimizer::OptimizerArgs),
    /// Compare the predicted peak of a step with the measured one, over a table of combinations; at scale smoke, every tenth row
    Peaks,
}

impl Verb {
    pub(crate) fn run(&self, driver: &Driver) -> anyhow::Result<()> {
        match self {
            Self::Methods(arguments) => driver.run("offload-methods", |bench| methods::run(bench, arguments)),
            Self::Timeline(arguments) => {
                driver.run("offload-timeline", |bench| timeline::run(bench, arguments))
            }
            Self::Tokens(arguments) => driver.run("offload-tokens", |bench| tokens::run(bench, arguments)),
            Self::Experts(arguments) => {
                driver.on_cpu().run("offload-experts", |bench| experts::run(bench, arguments))
            }
            Self::Large(arguments) => {
                driver.run(arguments.experiment(), |bench| large::run(bench, arguments))
            }
            Self::LongContext(arguments) => {
                driver.run("offload-long-context", |bench| long_context::run(bench, arguments))
            }
            Self::Equality(arguments) => {
                driver.run("offload-equality", |bench| equality::run(bench, arguments))
            }
            Self::Optimizer(arguments) => {
                driver.run("offload-optimizer", |bench| optimizer::run(bench, arguments))
            }
            // The allocator of the CPU counts in exact bytes, whatever device the other experiments take.
            Self::Peaks => driver.on_cpu().run("offload-peaks", peaks::run),
        }
    }
}
