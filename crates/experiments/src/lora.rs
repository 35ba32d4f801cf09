//! `lora`: steps and decoding on real shapes, a training on embedded data, and files exchanged with PEFT.

mod assignment;
mod decode;
mod embedded;
mod families;
mod first_steps;
mod generation;
mod interchange;
mod parameters;
mod rewards;
mod step;
mod techniques;

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Subcommand;

use crate::driver::Driver;

/// The group of figures to measure.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Measure a training step on a real model's shape, and compare it with the prediction
    Step(step::Step),
    /// Measure tokens per second of decoding on a real model's shape
    Decode(decode::Decode),
    /// Measure tokens per second of generation with a pretrained model's weights
    Generation(generation::Generation),
    /// Count the parameters of Qwen2.5-0.5B with the assignment's adapters
    Parameters,
    /// Adapt Qwen2.5-0.5B to GSM8K as the assignment asks, with pretrained weights
    Assignment(assignment::Assignment),
    /// Fine-tune a pretrained model for a few steps, with one technique changed at a time
    Techniques(techniques::Techniques),
    /// Let a pretrained model learn sums from grades of its own answers
    Rewards(rewards::Rewards),
    /// Fine-tune all weights of a pretrained model for some steps, by several optimizers
    Optimizers(techniques::Optimizers),
    /// Pretrain a small model on embedded data, adapt it, and grade its answers
    Embedded(embedded::EmbeddedArgs),
    /// Train the first steps of a fine-tuning beside PEFT
    #[command(hide = true)]
    FirstSteps(first_steps::FirstSteps),
    /// Exchange adapter files with PEFT
    #[command(hide = true)]
    Interchange(interchange::Interchange),
    /// Compare models that transformers made of every family
    #[command(hide = true)]
    Families(families::Families),
}

impl Verb {
    pub(crate) fn run(&self, driver: &Driver) -> anyhow::Result<()> {
        match self {
            Self::Step(arguments) => driver.run("lora-step", |bench| step::run(bench, arguments)),
            Self::Decode(arguments) => driver.run("lora-decode", |bench| decode::run(bench, arguments)),
            Self::Generation(arguments) => {
                driver.one_size().run("generation", |bench| generation::run(bench, arguments))
            }
            Self::Assignment(arguments) => {
                driver.one_size().run("lora-assignment", |bench| assignment::run(bench, arguments))
            }
            Self::Techniques(arguments) => {
                driver.one_size().on_cpu().run("real-techniques", |bench| techniques::run(bench, arguments))
            }
            Self::Optimizers(arguments) => driver
                .one_size()
                .on_cpu()
                .run("optimizers", |bench| techniques::run_optimizers(bench, arguments)),
            Self::Rewards(arguments) => {
                driver.one_size().on_cpu().run("rewards", |bench| rewards::run(bench, arguments))
            }
            Self::Parameters => driver.one_size().run("lora-parameters", parameters::run),
            Self::Embedded(arguments) => driver.run("lora-embedded", |bench| embedded::run(bench, arguments)),
            Self::FirstSteps(arguments) => first_steps::exchange(arguments),
            Self::Interchange(arguments) => match &arguments.folder {
                Some(folder) => interchange::exchange(folder),
                None => driver.one_size().on_cpu().run("peft-interchange", interchange::run),
            },
            Self::Families(arguments) => match &arguments.folder {
                Some(folder) => families::exchange(folder),
                None => driver.one_size().on_cpu().run("model-families", families::run),
            },
        }
    }
}

/// Returns the folders in a folder, by name.
fn folders(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(root).with_context(|| format!("cannot read {}", root.display()))?;
    let mut folders = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    folders.sort();
    Ok(folders)
}
