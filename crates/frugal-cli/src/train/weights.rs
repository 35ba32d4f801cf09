//! The trained weights of a training from scratch as a folder, and the files that it reads.

use std::path::Path;
use std::{fs, io};

use dataloading::Tokenizer;
use frugal::models::DecoderConfig;
use frugal::models::module::LanguageModel;
use frugal::run_folder::SplitRecord;
use frugal::training::optimizer::Optimizer;
use serde_json::json;

use crate::common_flags::Common;
use crate::folder::best_weights::Writer;
use crate::folder::model_folder::save_model;

/// The weights of a decoder, and the tokenizer that it was trained with.
pub(super) struct Weights {
    pub(super) common: Common,
    pub(super) config: DecoderConfig,
    pub(super) tokenizer: Option<Tokenizer>,
}

impl Writer for Weights {
    fn what(&self) -> &'static str {
        "model"
    }

    fn write(&self, model: &dyn LanguageModel, optimizer: &dyn Optimizer, path: &Path) -> anyhow::Result<()> {
        save_model(&self.common, (model, optimizer), &self.config, path, |new| {
            save_tokenizer(self.tokenizer.as_ref(), new)
        })
    }
}

/// The files of a source of documents; none of generated data.
pub(super) fn files(source: &Path) -> anyhow::Result<SplitRecord> {
    let mut files = Vec::new();
    if source.is_dir() {
        for entry in fs::read_dir(source)? {
            files.push(entry?.path());
        }
        files.retain(|path| path.is_file());
        files.sort();
    } else if source.is_file() {
        files.push(source.to_owned());
    }
    Ok(SplitRecord::of(&files, 0)?)
}

/// Writes `tokenizer.json`, and the token that ends a text into `generation_config.json`.
fn save_tokenizer(tokenizer: Option<&Tokenizer>, folder: &Path) -> io::Result<()> {
    let Some(tokenizer) = tokenizer else { return Ok(()) };
    fs::write(folder.join("tokenizer.json"), tokenizer.to_json().map_err(io::Error::other)?)?;
    match tokenizer.end_of_text() {
        Ok(end) => {
            fs::write(folder.join("generation_config.json"), json!({ "eos_token_id": end }).to_string())
        }
        Err(_) => Ok(()),
    }
}
