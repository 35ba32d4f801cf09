//! `lora step`.

use clap::Args;
use report::cli::CommonArgs;

#[derive(Args)]
pub(crate) struct Step {}

pub(crate) fn run(_: &CommonArgs, _: &Step) -> anyhow::Result<()> {
    Ok(())
}
