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
mod trace_spans;
mod whole_training;

use clap::Subcommand;
use report::cli::CommonArgs;

/// What is measured.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Measure whole trainings, one for each batching strategy
    Loading(loading::Loading),
    /// Measure steps with injected slowdowns on and off, and profile them
    Profile(profile::ProfileArgs),
    /// Measure one setup stage by stage: packed data, mixed precision, each repair, fused norms and loss
    Stages(stages::StagesArgs),
    /// Compare predicted and measured steps under activation plans
    Activations(activations::ActivationsArgs),
    /// Measure from which size on offloading the layers' inputs pays
    ActivationOffload(activation_offload::ActivationOffload),
    /// Measure steps of the GPT-2-like model on given sizes
    Bench(bench::Bench),
    /// Measure how time and memory of a step grow with what it works on
    Growth(growth::Growth),
    /// Measure forward and backward through decoder layers of a Llama
    Layers(layers::Layers),
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Loading(arguments) => loading::run(common, arguments),
        Verb::Profile(arguments) => profile::run(common, arguments),
        Verb::Stages(arguments) => stages::run(common, arguments),
        Verb::Activations(arguments) => activations::run(common, arguments),
        Verb::ActivationOffload(arguments) => activation_offload::run(common, arguments),
        Verb::Bench(arguments) => bench::run(common, arguments),
        Verb::Growth(arguments) => growth::run(common, arguments),
        Verb::Layers(arguments) => layers::run(common, arguments),
    }
}
