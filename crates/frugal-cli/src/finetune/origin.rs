//! Where a training's model and its companion files come from, so that they stay the same until it ends.

use std::path::Path;

use files::atomic_write;
use frugal::companion_files::{CHAT_TEMPLATE, CompanionFiles};
use frugal::config::{CONFIG_FILE, Config, DataConfig};
use frugal::models::hub;
use frugal::models::hugging_face::Folder;
use frugal::run_folder::RECORD;

/// The configuration with the commit that the training to be resumed has of its model.
pub(super) fn as_before(config: &Config, out: &Path, resume: bool) -> anyhow::Result<Config> {
    let mut config = config.clone();
    if let Some(earlier) = earlier(out, resume)?
        && config.model.revision.is_none()
        && config.model.name == earlier.model.name
    {
        config.model.revision = earlier.model.revision;
    }
    Ok(config)
}

/// The configuration with the commit of a model of the hub, whose branches move.
pub(super) fn with_commit(config: &Config, folder: &Folder) -> Config {
    let mut config = config.clone();
    let is_of_hub = config.model.name.as_deref().is_some_and(|name| !Path::new(name).is_dir());
    if let Some(commit) = hub::commit(folder.path()).filter(|_| is_of_hub) {
        config.model.revision = Some(commit.to_owned());
    }
    config
}

/// Takes the chat template of a run whose `config.toml` is the configuration's file: that which the file names may have changed since.
pub(super) fn take_template_of_run(config: &mut Config, file: &Path) {
    let folder = atomic_write::parent(file);
    let template = folder.join(CHAT_TEMPLATE);
    if config.data.chat_template.is_some() && template.is_file() && folder.join(RECORD).is_file() {
        config.data.chat_template = Some(template);
    }
}

/// The model's companion files, with the chat template of the training to be resumed.
pub(super) fn companions(
    config: &Config,
    folder: &Folder,
    out: &Path,
    resume: bool,
) -> anyhow::Result<CompanionFiles> {
    let mut data: DataConfig = config.data.clone();
    let template = out.join(CHAT_TEMPLATE);
    if let Some(earlier) = earlier(out, resume)?
        && earlier.data.chat_template == data.chat_template
        && template.is_file()
    {
        data.chat_template = Some(template);
    }
    Ok(CompanionFiles::of(folder, None, &data)?)
}

/// The configuration of the training to be resumed, if there is one.
fn earlier(out: &Path, resume: bool) -> anyhow::Result<Option<Config>> {
    let path = out.join(CONFIG_FILE);
    Ok(if resume && path.is_file() { Some(Config::read(&path)?) } else { None })
}
