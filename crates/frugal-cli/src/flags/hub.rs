//! Where a named model comes from.

use std::path::{Path, PathBuf};

use crate::download_bar;
use clap::Args;
use lora::peft::CONFIG_FILE;
use models::hub::Hub;
use models::hugging_face::{self, Folder};

/// How the hub is used.
#[derive(Args, Clone, Debug)]
pub(crate) struct HubArgs {
    /// Branch, tag or commit on the hub
    #[arg(long)]
    pub(crate) revision: Option<String>,
    /// Use the hub's cache only, never the network
    #[arg(long)]
    pub(crate) offline: bool,
    /// Of a GGUF file that holds the embedding again as the output head, keep both
    #[arg(long)]
    pub(crate) untied: bool,
}

impl HubArgs {
    /// Returns the folder of a model; downloads it if it is not here. That of a GGUF file is made in the user's cache.
    ///
    /// # Errors
    /// No such folder and no such model; a GGUF file that cannot be read.
    pub(crate) fn resolve(&self, model: &str) -> anyhow::Result<PathBuf> {
        if let Some(folder) = self.of_file(model)? {
            return Ok(folder);
        }
        let is_preset = accounting::presets::names().any(|name| name.eq_ignore_ascii_case(model));
        if is_preset && !Path::new(model).exists() {
            anyhow::bail!(
                "{model} is a preset of `frugal plan`: sizes without weights; give a folder in Hugging Face's layout, or a name on the hub \
                 with its owner, as Qwen/Qwen2.5-0.5B"
            );
        }
        let hub = Hub { progress: Some(download_bar::terminal_bar()), ..Hub::from_env(self.offline) };
        Ok(hub.resolve(model, self.revision.as_deref())?)
    }

    /// Returns the folder of a GGUF file or of a model in Ollama's store; `None` for another name.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(crate) fn of_file(&self, model: &str) -> anyhow::Result<Option<PathBuf>> {
        Ok(hugging_face::of_file(model, self.untied)?)
    }

    /// Opens the folder of a model; downloads it if it is not here.
    ///
    /// # Errors
    /// No such folder and no such model; a folder that is an adapter's or lacks a file.
    pub(crate) fn open(&self, model: &str) -> anyhow::Result<Folder> {
        let path = self.resolve(model)?;
        Folder::open(&path).map_err(|error| match path.join(CONFIG_FILE).is_file() {
            true => anyhow::anyhow!("{error}; this is an adapter's folder: give the model that it is of"),
            false => error.into(),
        })
    }
}

/// Returns whether two paths are the same folder.
pub(crate) fn same_folder(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| PathBuf::from(path));
    real(one) == real(other)
}
