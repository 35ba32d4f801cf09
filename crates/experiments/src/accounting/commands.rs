//! The subcommands: each turns its flags into a text for people, JSON for programs, and records.

mod dtypes;
mod estimate;
mod experiment;
mod fit;
mod flops;
mod kv_cache;
mod lecture;
mod model_args;
mod offload;
mod parameters;
mod plan_args;
mod table;
mod time;

use clap::Subcommand;
use report::{Environment, Record};
use serde_json::Value;

/// What a subcommand gives.
pub(crate) struct Output {
    /// Tables for people.
    pub(crate) text: String,
    /// The same for programs.
    pub(crate) json: Value,
    /// The same for the report.
    pub(crate) records: Vec<Record>,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// What each number format can hold, and the bytes of a tensor
    Dtypes(dtypes::Args),
    /// The tensors of a model with their shapes, and how many parameters they are
    Parameters(parameters::Args),
    /// FLOPs of a training step, product by product, and where 6·N·D fails
    Flops(flops::Args),
    /// The memory of a training step on one device, part by part
    Estimate(estimate::Args),
    /// The largest batch, the longest sequence and the largest model that fit a device
    Fit(fit::Args),
    /// Which layers live on the host, what ring they pass through, and from how many tokens on their loads are free
    Offload(offload::Args),
    /// Training time from parameters and tokens, or utilization from a measured time
    Time(time::Args),
    /// Memory of the keys and values that generation keeps
    KvCache(kv_cache::Args),
    /// The lecture's questions, its small models, and its slips corrected
    Lecture(lecture::Args),
    /// The records of the report's sections about accounting
    Experiment(experiment::Args),
}

impl Command {
    pub(crate) fn run(&self, environment: &Environment) -> anyhow::Result<Output> {
        match self {
            Self::Dtypes(args) => args.run(environment),
            Self::Parameters(args) => args.run(environment),
            Self::Flops(args) => args.run(environment),
            Self::Estimate(args) => args.run(environment),
            Self::Fit(args) => args.run(environment),
            Self::Offload(args) => args.run(environment),
            Self::Time(args) => args.run(environment),
            Self::KvCache(args) => args.run(environment),
            Self::Lecture(args) => args.run(environment),
            Self::Experiment(args) => args.run(environment),
        }
    }
}
