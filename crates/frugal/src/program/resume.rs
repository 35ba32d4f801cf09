//! `frugal resume`.

use std::path::PathBuf;

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
    let mut config = Config::read(&arguments.folder.join(CONFIG_FILE))?;
    if let Some(device) = &common.device {
        config.training.device.clone_from(device);
    }
    match config.task {
        Task::Finetune => finetune::launch(common, &config, &arguments.folder, true),
        Task::Train => train::launch(common, &config, Some(&arguments.folder), true, None),
    }
}
