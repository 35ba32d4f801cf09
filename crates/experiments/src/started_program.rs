//! The program `frugal`, started by measurements, and the models that it reads.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use models::{Llama, hugging_face};

/// The program's path: beside this one, where the same build puts it.
///
/// # Errors
/// No such file.
pub(crate) fn path() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("finding this program")?.with_file_name("frugal");
    ensure!(
        program.is_file(),
        "{} is missing; build it: cargo build --package frugal-cli",
        program.display()
    );
    Ok(program)
}

/// Writes a model with the tokenizer of the embedded data.
///
/// # Errors
/// A full disk.
pub(crate) fn write_model(model: &Llama, folder: &Path) -> anyhow::Result<()> {
    hugging_face::save(model, folder, hugging_face::SHARD_BYTES)?;
    add_tokenizer(folder)
}

/// Adds the tokenizer of the embedded data to a model's folder.
///
/// # Errors
/// A full disk.
pub(crate) fn add_tokenizer(folder: &Path) -> anyhow::Result<()> {
    let tokenizer = dataloading::embedded::folder()?.join("tokenizer.json");
    std::fs::copy(tokenizer, folder.join("tokenizer.json"))?;
    Ok(std::fs::write(folder.join("generation_config.json"), r#"{"eos_token_id": 0}"#)?)
}
