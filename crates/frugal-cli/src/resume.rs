//! `frugal resume`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::bail;
use clap::Args;
use frugal::Config;
use frugal::config::{CONFIG_FILE, Task};
use frugal::run_folder::{CHECKPOINTS, RunRecord};
use runtime::collectives::Launch;

use super::flags::Flags;
use super::flags::origins::origins_of_resume;
use super::flags::table::RESUME;
use super::flags::unread;
use super::run::job::{RunOptions, Start};
use super::{finetune, train};
use crate::common_flags::Common;
use crate::output::ended_training::report_finished;

#[derive(Args)]
pub(crate) struct Resume {
    /// The output folder of a training: everything comes from its config.toml and its checkpoints
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    #[command(flatten)]
    flags: Flags<RESUME>,
}

pub(crate) fn run(common: &Common, arguments: &Resume) -> anyhow::Result<()> {
    let path = arguments.folder.join(CONFIG_FILE);
    if !path.is_file() {
        if arguments.folder.join(CHECKPOINTS).is_dir() {
            bail!(
                "{}: the training was stopped before its first step and left no config.toml; start it again",
                arguments.folder.display()
            );
        }
        let what = if arguments.folder.is_dir() { "no config.toml in it" } else { "no such folder" };
        let of_another = match Launch::from_environment()? {
            Some(launch) if !launch.is_local() => ", copied from machine 0",
            _ => "",
        };
        bail!("{}: {what}; give the --out folder of a training{of_another}", arguments.folder.display());
    }
    if common.flags.has(&["--seed"]) {
        bail!("--seed: a training that is resumed keeps its seed; leave it out, or begin another training");
    }
    let before = Config::read(&path)?;
    let mut config = arguments.flags.over(&before)?;
    if (config.task, config.method()) != (before.task, before.method()) {
        bail!(
            "`task` and `method` stay as they are in a run that is resumed; leave them out, or begin another training"
        );
    }
    if let Some(device) = common.device_name() {
        device.clone_into(&mut config.training.device);
    }
    if Launch::from_environment()?.is_none() && report_finished(common, &arguments.folder, &config)? {
        return Ok(());
    }
    check_data(&config)?;
    let record = RunRecord::read(&arguments.folder)?;
    let origins = origins_of_resume(&config, record.as_ref(), &arguments.flags, &common.flags)?;
    let mut asked = origins.clone();
    asked.retain(|key| {
        let flag = arguments.flags.flag_for(key).or_else(|| common.flags.flag_for(key));
        flag.is_some() || arguments.flags.assigned_keys().any(|assigned| assigned == key)
    });
    let common = &Common { origins, asked, earlier: record.map(Arc::new), ..common.clone() };
    unread::refuse(common, &config)?;
    common.choose_device(&mut config)?;
    let options = RunOptions { out: Some(&arguments.folder), start: Start::Resume, diagnosis: None };
    match config.task {
        Task::Finetune => finetune::launch(common, &config, options),
        Task::Train => train::launch(common, &config, options),
    }
}

/// Refuses a run whose data are gone: the paths in its configuration are absolute.
fn check_data(config: &Config) -> anyhow::Result<()> {
    let source = Some(Path::new(&config.data.source));
    let own =
        [("training", "source", source), ("validation", "validation", config.data.validation.as_deref())];
    let mixed =
        config.data.mixture.iter().map(|source| ("training", "mixture", Some(Path::new(&source.source))));
    let files = own.into_iter().chain(mixed);
    for (what, key, path) in files {
        if let Some(path) = path.filter(|path| path.is_absolute() && !path.exists()) {
            bail!(
                "the run's {what} data are missing: {}; put them back, or name their new place: --set data.{key}={}",
                path.display(),
                if key == "mixture" { "'[\"PATH=WEIGHT\", …]'" } else { "PATH" }
            );
        }
    }
    Ok(())
}
