//! `lora decode`.

use clap::Args;
use report::cli::CommonArgs;

#[derive(Args)]
pub(crate) struct Decode {}

pub(crate) fn run(_: &CommonArgs, _: &Decode) -> anyhow::Result<()> {
    Ok(())
}
