//! `amp numerics`: how far autocast in bf16 is from the exact loss and gradients.

use std::path::PathBuf;

use report::{Case, Metric};
use tch::Kind;

use super::exact;
use crate::driver::Bench;

#[derive(clap::Args)]
pub(crate) struct Numerics {
    /// The folder of the fixture
    #[arg(long, default_value = "data/fixtures/gpt2_like")]
    fixture: PathBuf,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Numerics) -> anyhow::Result<()> {
    for (tensor, error) in exact::run(&arguments.fixture, Kind::BFloat16)? {
        let metrics = vec![
            Metric::exact("error", "ratio", error),
            // The limit: the peer's error and the tolerance.
            Metric::exact("allowed_error", "ratio", error),
        ];
        bench.put(&Case::new().with("tensor", tensor), metrics)?;
    }
    Ok(())
}
