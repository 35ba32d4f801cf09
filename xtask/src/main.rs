//! Makes libtorch available, runs the experiments, renders the reports: `cargo xtask VERB`.
//!
//! Never links libtorch, so that it builds in seconds on a machine that has none. One module per verb; what several
//! verbs share has a module of its own:
//!
//! | module | subject |
//! |---|---|
//! | [`workspace`] | the paths of a checkout or of an unpacked bundle |
//! | [`torch`] | one libtorch folder: its version, and whether it reaches CUDA |
//! | [`python`], [`venv`] | the interpreter, and private environments that survive being interrupted |
//! | [`cargo`] | cargo as a child that finds libtorch |
//! | [`runner`], [`display`] | one program as a child with its log, and the bars that show it |

// A program's output is its standard output.
#![allow(clippy::print_stdout)]

mod archive;
mod bundle;
mod cargo;
mod compare;
mod dependencies;
mod device;
mod display;
mod gpu_day;
mod interrupt;
mod kernels;
mod lint;
mod pages;
mod programs;
mod python;
mod release;
mod revision;
mod run_all;
mod runner;
mod select;
mod setup;
mod stamp;
mod test;
mod torch;
mod venv;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

/// Makes libtorch available, runs the experiments, renders the reports
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Command {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Find or install libtorch and link it as .libtorch
    Setup(setup::Args),
    /// Set up, run the experiments, write the report, check the claims
    RunAll(run_all::Args),
    /// Set up, then run all tests
    Test(test::Args),
    /// Check formatting, lints, documentation and licences
    Lint,
    /// Write the linked packages, their licences and checksums as a CycloneDX file
    Sbom(dependencies::Args),
    /// Render the report from existing records, or compare two runs
    Report(pages::Args),
    /// Compare with PyTorch, running both alternately on this machine
    Compare(compare::Args),
    /// Check what each CUDA kernel costs, without a GPU
    Kernels(kernels::Args),
    /// Test and measure on a GPU within the minutes of a plan
    GpuDay(gpu_day::Args),
    /// Pack release binaries for a machine with torch and without Rust
    Bundle(bundle::Args),
    /// Make what people install without Rust: a wheel, an archive with libtorch, their packages and checksums
    Release(release::Args),
}

fn main() -> ExitCode {
    let command = Command::parse();
    report::cli::run(|| {
        let workspace = Workspace::find()?;
        match command.verb {
            Verb::Setup(args) => setup::run(&workspace, &args),
            Verb::RunAll(args) => run_all::run(&workspace, &args),
            Verb::Test(args) => test::run(&workspace, &args),
            Verb::Lint => lint::run(&workspace),
            Verb::Sbom(args) => dependencies::run(&workspace, &args),
            Verb::Report(args) => pages::run(&workspace, &args),
            Verb::Compare(args) => compare::run(&workspace, &args),
            Verb::Kernels(args) => kernels::run(&workspace, &args),
            Verb::GpuDay(args) => gpu_day::run(&workspace, &args),
            Verb::Bundle(args) => bundle::run(&workspace, &args),
            Verb::Release(args) => release::run(&workspace, &args),
        }
    })
}
