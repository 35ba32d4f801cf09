//! `training`: the cost of data loading strategies, injected slowdowns and activation plans.

mod activation_offload;
pub mod activation_plan;
mod activations;
mod bench;
mod growth;
pub mod injected_slowdowns;
mod layers;
mod loading;
mod profile;
mod profiling;
pub mod setup;
mod sizes;
mod stages;
pub(crate) mod stepped;
mod trace_spans;
mod whole_training;

use clap::Subcommand;

use crate::corpus::DataArgs;
use crate::driver::Driver;

/// The group of figures to measure.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Measure whole trainings, one for each batching strategy
    Loading(loading::Loading),
    /// Measure steps with injected slowdowns on and off, and profile them
    Profile(profile::ProfileArgs),
    /// Measure one setup stage by stage: packed data, mixed precision, each repair, fused norms and loss
    Stages(DataArgs),
    /// Compare predicted and measured steps under activation plans
    Activations,
    /// Measure from which size on offloading the layers' inputs pays
    ActivationOffload,
    /// Measure steps of the GPT-2-like model on given sizes
    Bench(bench::BenchArgs),
    /// Measure how time and memory of a step grow with what it works on
    Growth,
    /// Measure forward and backward through decoder layers of a Llama
    Layers(layers::Layers),
}

impl Verb {
    pub(crate) fn run(&self, driver: &Driver) -> anyhow::Result<()> {
        match self {
            Self::Loading(arguments) => driver.run("loading", |bench| loading::run(bench, arguments)),
            Self::Profile(arguments) => driver.run("profile", |bench| profile::run(bench, arguments)),
            Self::Stages(data) => driver.run("stages", |bench| stages::run(bench, data)),
            Self::Activations => driver.run("activation-plan", activations::run),
            Self::ActivationOffload => driver.run("activation-offload", activation_offload::run),
            Self::Bench(arguments) => {
                driver.one_size().run("training-bench", |bench| bench::run(bench, arguments))
            }
            Self::Growth => driver.run("growth", growth::run),
            Self::Layers(arguments) => driver.one_size().run("layers", |bench| layers::run(bench, arguments)),
        }
    }
}
