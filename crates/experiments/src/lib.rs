//! The measurements behind the reports, and the code that only measurements need.
//!
//! The program is `experiments CRATE VERB`, where CRATE is the measured crate; its module has the same name. The tables, plots and
//! claims of each measurement are registered in `experiments/<crate>.toml`, from which `xtask` runs it and `report` renders it.
//! Baselines (implementations of other frameworks), injected slowdowns and training corpora are here too: no library contains code
//! that only a measurement needs.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod accounting;
mod amp;
pub mod corpus;
pub mod dataloading;
mod driver;
mod dtype;
mod environment;
pub mod fused_ce;
mod gguf;
mod gpu_busy;
mod installed;
mod lora;
pub mod offload;
mod planning;
mod processes;
mod robustness;
mod runtime;
mod shape;
mod sharding;
mod started_program;
mod step_peak;
pub mod swiglu_ckpt;
pub mod training;
mod training_recorder;

/// Measures what each crate of the project costs and saves, for the reports
#[derive(Parser)]
#[command(name = "experiments", version)]
struct Cli {
    #[command(subcommand)]
    measured: Measured,
    #[command(flatten)]
    driver: driver::Driver,
}

/// The crate that is measured.
#[derive(Subcommand)]
enum Measured {
    /// Parameters, FLOPs, bytes and training time of language models, on paper
    #[command(subcommand)]
    Accounting(crate::accounting::Verb),
    /// Mixed precision: loss scalers and autocast
    #[command(subcommand)]
    Amp(crate::amp::Verb),
    /// Datasets, samplers, packing and loaders that resume
    #[command(subcommand)]
    Dataloading(crate::dataloading::Verb),
    /// The output projection and the cross-entropy as one operation that never holds all logits
    #[command(subcommand)]
    FusedCe(crate::fused_ce::Verb),
    /// Models and adapters as GGUF files for llama.cpp
    #[command(subcommand)]
    Gguf(crate::gguf::Verb),
    /// Low-rank adaptation of a frozen model, in PEFT's files
    #[command(subcommand)]
    Lora(crate::lora::Verb),
    /// Weights, gradients and optimizer state on the host or in files
    #[command(subcommand)]
    Offload(crate::offload::Verb),
    /// The plan that a training chooses, beside every other one
    #[command(subcommand)]
    Planning(crate::planning::Verb),
    /// The program killed, with system calls that fail, and over many steps
    #[command(subcommand)]
    Robustness(crate::robustness::Verb),
    /// Rates of this machine, and costs of the runtime on it
    #[command(subcommand)]
    Runtime(crate::runtime::Verb),
    /// Trainings over ranks that divide optimizer state and gradients
    #[command(subcommand)]
    Sharding(crate::sharding::Verb),
    /// A SwiGLU MLP that keeps or recomputes its activations
    #[command(subcommand)]
    SwigluCkpt(crate::swiglu_ckpt::Verb),
    /// Optimizers, schedules, losses, the training loop, crash-safe checkpoints
    #[command(subcommand)]
    Training(crate::training::Verb),
}

/// Runs the program.
pub fn run() -> ExitCode {
    let Cli { measured, driver } = Cli::parse();
    report::cli::run(|| {
        // The measured programs do the same.
        ::runtime::memory::set_block_cache(true)?;
        match &measured {
            Measured::Accounting(verb) => verb.run(&driver),
            Measured::Amp(verb) => verb.run(&driver),
            Measured::Dataloading(verb) => verb.run(&driver),
            Measured::FusedCe(verb) => verb.run(&driver),
            Measured::Gguf(verb) => verb.run(&driver),
            Measured::Lora(verb) => verb.run(&driver),
            Measured::Offload(verb) => verb.run(&driver),
            Measured::Planning(verb) => verb.run(&driver),
            Measured::Robustness(verb) => verb.run(&driver),
            Measured::Runtime(verb) => verb.run(&driver),
            Measured::Sharding(verb) => verb.run(&driver),
            Measured::SwigluCkpt(verb) => verb.run(&driver),
            Measured::Training(verb) => verb.run(&driver),
        }
    })
}
