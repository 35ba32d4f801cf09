//! Everything that is measured for the reports, and what only measurements need.
//!
//! The program is `experiments CRATE VERB`, where CRATE is the crate that is measured; a module here has its name. What each
//! measurement shows and claims is registered in `experiments/<crate>.toml`, from which `xtask` runs it and `report` shows it.
//! Baselines (what other frameworks do), injected slowdowns and the corpora that are trained on live here too: no library
//! contains code that only a measurement needs.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use report::cli::CommonArgs;

mod amp;
pub mod dataloading;
mod environment;
pub mod fused_ce;
pub mod swiglu_ckpt;

/// Measures what each crate of the project costs and saves, for the reports
#[derive(Parser)]
#[command(name = "experiments", version)]
struct Cli {
    #[command(subcommand)]
    measured: Measured,
    #[command(flatten)]
    common: CommonArgs,
}

/// The crate that is measured.
#[derive(Subcommand)]
enum Measured {
    /// Mixed precision: loss scalers, autocast, and what they buy
    #[command(subcommand)]
    Amp(crate::amp::Verb),
    /// Datasets, samplers, packing and loaders that resume
    #[command(subcommand)]
    Dataloading(crate::dataloading::Verb),
    /// The output projection and the cross-entropy as one operation that never holds all logits
    #[command(subcommand)]
    FusedCe(crate::fused_ce::Verb),
    /// A SwiGLU MLP that keeps or recomputes its activations
    #[command(subcommand)]
    SwigluCkpt(crate::swiglu_ckpt::Verb),
}

/// Runs the program.
pub fn run() -> ExitCode {
    let Cli { measured, common } = Cli::parse();
    report::cli::run(|| match &measured {
        Measured::Amp(verb) => crate::amp::run(&common, verb),
        Measured::Dataloading(verb) => crate::dataloading::run(&common, verb),
        Measured::FusedCe(verb) => crate::fused_ce::run(&common, verb),
        Measured::SwigluCkpt(verb) => crate::swiglu_ckpt::run(&common, verb),
    })
}
