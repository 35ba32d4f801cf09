//! The trained weights of a fine-tuning, as files.

use std::path::Path;
use std::rc::Rc;

use frugal::companion_files::CompanionFiles;
use frugal::lora::Adapters;
use frugal::models::hugging_face::Folder;
use frugal::models::module::LanguageModel;
use frugal::training::optimizer::Optimizer;
use tch::Tensor;

use crate::common_flags::Common;
use crate::folder::best_weights::Writer;
use crate::folder::model_folder::{complete, save_model};

/// The trained weights of a fine-tuning: its adapters, or all weights.
pub(super) struct Weights {
    pub(super) common: Common,
    pub(super) adapters: Option<Adapters>,
    pub(super) base: Rc<Folder>,
    pub(super) companions: CompanionFiles,
}

impl Writer for Weights {
    fn what(&self) -> &'static str {
        if self.adapters.is_some() { "adapter" } else { "model" }
    }

    fn write(&self, model: &dyn LanguageModel, optimizer: &dyn Optimizer, path: &Path) -> anyhow::Result<()> {
        let Some(adapters) = &self.adapters else {
            // With what the base's folder has beside the weights.
            return save_model(&self.common, (model, optimizer), self.base.config(), path, |new| {
                complete(&self.base, &self.companions, new)
                    .map_err(|error| std::io::Error::other(format!("{error:#}")))
            });
        };
        let folder = self.common.is_first().then_some(path);
        let lazy = |name, tensor: &Tensor| optimizer.lazy_weight(name, tensor);
        adapters.save_lazily(folder, &lazy)?;
        // PEFT's users find them beside the adapter, as after other trainings.
        if let Some(folder) = folder {
            self.companions.write(folder)?;
        }
        Ok(())
    }
}
