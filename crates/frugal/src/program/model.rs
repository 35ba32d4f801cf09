//! Models by name or folder.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use frugal::download_bar;
use lora::Adapters;
use lora::peft::CONFIG_FILE;
use models::Llama;
use models::hub::Hub;
use models::hugging_face::Folder;
use models::module::LanguageModel;
use tch::Device;

use super::settings::DtypeArg;

/// Which model.
#[derive(Args, Clone, Debug)]
pub(crate) struct ModelArgs {
    /// A folder in Hugging Face's layout, or a name on the hub, such as Qwen/Qwen2.5-0.5B
    #[arg(long, value_name = "NAME_OR_FOLDER")]
    pub(crate) model: String,
    #[command(flatten)]
    pub(crate) hub: HubArgs,
    /// Dtype of the weights [default: that of the files]
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<DtypeArg>,
}

/// How the hub is used.
#[derive(Args, Clone, Debug)]
pub(crate) struct HubArgs {
    /// Branch, tag or commit on the hub
    #[arg(long)]
    pub(crate) revision: Option<String>,
    /// Use the hub's cache only, never the network
    #[arg(long)]
    pub(crate) offline: bool,
}

impl HubArgs {
    /// Returns the folder of a model; downloads it if it is not here.
    ///
    /// # Errors
    /// No such folder and no such model.
    pub(crate) fn resolve(&self, model: &str) -> anyhow::Result<PathBuf> {
        let hub = Hub { progress: Some(download_bar::terminal_bar()), ..Hub::from_env(self.offline) };
        Ok(hub.resolve(model, self.revision.as_deref())?)
    }

    /// Opens the folder of a model; downloads it if it is not here.
    ///
    /// # Errors
    /// No such folder and no such model; a folder that is an adapter's or lacks a file.
    pub(crate) fn open(&self, model: &str) -> anyhow::Result<Folder> {
        let path = self.resolve(model)?;
        Folder::open(&path).map_err(|error| match path.join(CONFIG_FILE).is_file() {
            true => anyhow::anyhow!(
                "{error}; this is an adapter's folder: give it as --adapter, and its base as --model"
            ),
            false => error.into(),
        })
    }
}

impl ModelArgs {
    /// The model's folder.
    ///
    /// # Errors
    /// Those of [`HubArgs::open`].
    pub(crate) fn open(&self) -> anyhow::Result<Folder> {
        self.hub.open(&self.model)
    }

    /// The model.
    ///
    /// # Errors
    /// Those of [`Folder::load`].
    pub(crate) fn load(&self, folder: &Folder, device: Device) -> anyhow::Result<Llama> {
        Ok(folder.load(self.dtype.map(|dtype| dtype.get().kind()), device)?)
    }
}

/// Returns the model with an adapter, if one is given. It is not for training.
///
/// # Errors
/// A missing adapter, or one of another base.
pub(crate) fn with_adapter(
    mut model: Llama,
    adapter: Option<&Path>,
) -> anyhow::Result<Box<dyn LanguageModel>> {
    let Some(folder) = adapter else { return Ok(Box::new(model)) };
    load_adapter(&mut model, folder)?;
    Ok(Box::new(model))
}

/// Loads the adapter of a folder into the model.
///
/// # Errors
/// As [`with_adapter`].
pub(crate) fn load_adapter(model: &mut Llama, folder: &Path) -> anyhow::Result<Adapters> {
    Adapters::load(model, folder).with_context(|| format!("the adapter {}", folder.display()))
}

/// Refuses an output that exists: a file, or a folder with something in it.
///
/// # Errors
/// It exists, and is not to be replaced.
pub(crate) fn refuse_existing(out: &Path, overwrite: bool) -> anyhow::Result<()> {
    let exists = match out.read_dir() {
        Ok(mut entries) => entries.next().is_some(),
        Err(_) => out.exists(),
    };
    if exists && !overwrite {
        bail!("--out {} exists; give another, or --overwrite to replace what is there", out.display());
    }
    Ok(())
}

/// Returns whether two paths are the same folder.
pub(crate) fn same_folder(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| PathBuf::from(path));
    real(one) == real(other)
}
