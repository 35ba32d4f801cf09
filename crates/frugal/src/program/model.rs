//! Models by name or folder.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum};
use frugal::download_bar;
use lora::Adapters;
use lora::peft::CONFIG_FILE;
use models::Llama;
use models::hub::Hub;
use models::hugging_face::Folder;
use models::module::LanguageModel;
use tch::{Device, Kind};

/// Which model.
#[derive(Args, Clone, Debug)]
pub(crate) struct ModelArgs {
    /// A folder in Hugging Face's layout, or a name on the hub, such as Qwen/Qwen2.5-0.5B
    #[arg(long, value_name = "NAME_OR_FOLDER")]
    pub(crate) model: String,
    #[command(flatten)]
    pub(crate) hub: HubArgs,
    /// What the weights are kept in [default: what the files have]
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<Dtype>,
}

/// How the hub is asked.
#[derive(Args, Clone, Debug)]
pub(crate) struct HubArgs {
    /// Branch, tag or commit on the hub
    #[arg(long)]
    pub(crate) revision: Option<String>,
    /// Take what is in the hub's cache, and never use the network
    #[arg(long)]
    pub(crate) offline: bool,
}

/// A dtype, by its name in PyTorch or for short.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    #[value(alias = "f32")]
    Float32,
    #[value(alias = "bf16")]
    Bfloat16,
    #[value(alias = "f16")]
    Float16,
    #[value(alias = "f64")]
    Float64,
}

impl Dtype {
    pub(crate) fn kind(self) -> Kind {
        match self {
            Self::Float32 => Kind::Float,
            Self::Bfloat16 => Kind::BFloat16,
            Self::Float16 => Kind::Half,
            Self::Float64 => Kind::Double,
        }
    }
}

impl HubArgs {
    /// The folder of a model, fetched where it is not here, with a bar of the bytes.
    ///
    /// # Errors
    /// No such folder and no such model; a folder that is an adapter's or lacks a file.
    pub(crate) fn open(&self, model: &str) -> anyhow::Result<Folder> {
        let hub = Hub { progress: Some(download_bar::terminal_bar()), ..Hub::from_env(self.offline) };
        let path = hub.resolve(model, self.revision.as_deref())?;
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
        Ok(folder.load(self.dtype.map(Dtype::kind), device)?)
    }
}

/// The model with the adapter of a folder in it, where one is given; not to be trained.
///
/// # Errors
/// An adapter that is not there, or of another base.
pub(crate) fn with_adapter(
    mut model: Llama,
    adapter: Option<&Path>,
) -> anyhow::Result<Box<dyn LanguageModel>> {
    let Some(folder) = adapter else { return Ok(Box::new(model)) };
    load_adapter(&mut model, folder)?;
    Ok(Box::new(model))
}

/// The adapter of a folder, put into the model.
///
/// # Errors
/// As [`with_adapter`].
pub(crate) fn load_adapter(model: &mut Llama, folder: &Path) -> anyhow::Result<Adapters> {
    Adapters::load(model, folder).with_context(|| format!("the adapter {}", folder.display()))
}

/// Whether two paths are one folder.
pub(crate) fn same_folder(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| PathBuf::from(path));
    real(one) == real(other)
}
