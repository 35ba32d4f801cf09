//! `frugal resume`.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use frugal::Config;
use frugal::config::{CONFIG_FILE, Task};

use super::{Common, finetune, train};

#[derive(Args)]
pub(crate) struct Resume {
    /// The output folder of a training: everything comes from its config.toml and its checkpoints
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

pub(crate) fn run(common: &Common, arguments: &Resume) -> anyhow::Result<()> {
    let path = arguments.folder.join(CONFIG_FILE);
    if !path.is_file() {
        bail!("{}: no {CONFIG_FILE} in it; give the --out folder of a training", arguments.folder.display());
    }
    let mut config = Config::read(&path)?;
    if let Some(device) = &common.device {
        config.training.device.clone_from(device);
    }
    match config.task {
        Task::Finetune => finetune::launch(common, &config, &arguments.folder, true),
        Task::Train => train::launch(common, &config, Some(&arguments.folder), true, None),
    }
}
