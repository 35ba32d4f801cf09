//! `training`: what ways of loading data, injected slowdowns and activation plans cost.

pub mod activation_plan;
mod activations;
mod bench;
pub mod injected_slowdowns;
mod layers;
mod loading;
mod profile;
mod profiling;
pub mod setup;
mod sizes;
mod whole_training;

use clap::Subcommand;
use report::cli::CommonArgs;

/// What is measured.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Measure whole trainings, one for each way of loading data
    Loading(loading::Loading),
    /// Measure steps with injected slowdowns on and off, and profile them
    Profile(profile::ProfileArgs),
    /// Measure steps with all injected slowdowns on, then with one repaired after another
    Repair(profile::RepairArgs),
    /// Measure steps under plans of what each layer keeps, against what was predicted
    Activations(activations::ActivationsArgs),
    /// Measure steps of the GPT-2-like model on given sizes
    Bench(bench::Bench),
    /// Measure forward and backward through decoder layers of a Llama
    Layers(layers::Layers),
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Loading(arguments) => loading::run(common, arguments),
        Verb::Profile(arguments) => profile::run(common, arguments),
        Verb::Repair(arguments) => profile::run_repair(common, arguments),
        Verb::Activations(arguments) => activations::run(common, arguments),
        Verb::Bench(arguments) => bench::run(common, arguments),
        Verb::Layers(arguments) => layers::run(common, arguments),
    }
}
