//! Models by name or folder.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use frugal::config::{DataConfig, Dtype};
use lora::Adapters;
use models::Llama;
use models::hugging_face::Folder;
use models::module::{LanguageModel, first_non_finite};
use tch::Device;

use crate::common_flags::Common;
use crate::flags::hub::HubArgs;
use crate::folder::run_model::{Target, WhichArgs};

/// The model.
#[derive(Args, Clone, Debug)]
pub(crate) struct ModelArgs {
    /// A folder in Hugging Face's layout, a GGUF file, a name in Ollama's store (ollama:NAME), a name on the hub, such as
    /// Qwen/Qwen2.5-0.5B, or the output folder of a training
    #[arg(long, value_name = "NAME_OR_FOLDER")]
    pub(crate) model: String,
    #[command(flatten)]
    which: WhichArgs,
    #[command(flatten)]
    pub(crate) hub: HubArgs,
    /// Dtype of the weights [default: that of the files]
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<Dtype>,
}

/// A model that was found.
pub(crate) struct Found {
    pub(crate) folder: Folder,
    pub(crate) adapter: Option<PathBuf>,
    /// How rows were made, where a training made the weights.
    pub(crate) data: Option<DataConfig>,
}

impl ModelArgs {
    /// The model's folder, the adapter that was given or that a training made, and how that made its rows. Says what it takes of a
    /// training's output folder.
    ///
    /// # Errors
    /// As [`Target::find`] and [`HubArgs::open`].
    pub(crate) fn find(&self, common: &Common, adapter: Option<&Path>) -> anyhow::Result<Found> {
        let is_model = Path::new(&self.model).join("config.json").is_file();
        if let Some(revision) = self.hub.revision.as_deref().filter(|_| is_model) {
            anyhow::bail!(
                "{} is a folder, which has no revision {revision}; leave out --revision, or give a name on the hub",
                self.model
            );
        }
        let mut target = Target::find(&self.model, self.which)?;
        target.note(common);
        target.take_adapter(adapter);
        let folder = target.open(&self.hub)?;
        target.note_other_base(common, &folder, self.dtype);
        note_own_head(common, &folder);
        Ok(Found { folder, adapter: target.adapter, data: target.data })
    }

    /// The model.
    ///
    /// # Errors
    /// As [`Folder::load`].
    pub(crate) fn load(&self, folder: &Folder, device: Device) -> anyhow::Result<Llama> {
        Ok(folder.load(self.dtype.map(|dtype| dtype.kind()), device)?)
    }
}

/// Says that a model's head is not what its `config.json` says, which parts are left out, and what a GGUF file's reader says.
pub(crate) fn note_own_head(common: &Common, folder: &Folder) {
    for note in folder.gguf_file().into_iter().flat_map(|file| file.notes()) {
        common.note(&format!("note: {note}"));
    }
    for part in folder.parts_not_read() {
        common.note(&format!("note: {}: {part} is left out", folder.path().display()));
    }
    if folder.has_own_head() {
        common.note(&format!(
                "note: {}: config.json ties the head to the embedding, but the files have a head with other values; it is used, as by \
                 transformers 5 (4 ignores it)",
                folder.path().display()
            ),
        );
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

/// Returns the error of a loss that is not finite, with the weight that is the reason, if one is.
///
/// # Errors
/// Any error of libtorch.
pub(crate) fn not_finite(model: &dyn LanguageModel, loss: f64) -> anyhow::Result<anyhow::Error> {
    Ok(match first_non_finite(model)? {
        Some(name) => anyhow::anyhow!(
            "the loss is {loss}, because `{name}` has an infinity or a NaN; the model's files are broken: get them again, or take an \
             earlier checkpoint's"
        ),
        None => anyhow::anyhow!(
            "the loss is {loss}, though all weights are finite; their dtype is too narrow for the model: give --dtype float32"
        ),
    })
}
