//! A model's folder in Hugging Face's layout: its weights, and what belongs to it besides.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use frugal::companion_files::CompanionFiles;
use frugal::training::optimizer::Optimizer;
use models::DecoderConfig;
use models::hugging_face::{Folder, ModelFiles, SHARD_BYTES};
use models::module::{self, LanguageModel};
use serde_json::{Map, Value};
use tch::Tensor;

use crate::common_flags::Common;

/// Keys of transformers for the dtype of the weights.
const DTYPES: [&str; 2] = ["dtype", "torch_dtype"];
/// Keys of the rotary embedding, old and new.
const ROPE: [&str; 3] = ["rope_theta", "rope_scaling", "rope_parameters"];
/// The field of weights that are quantized, which the written model has itself if they are.
const QUANTIZATION: &str = "quantization_config";
const CONFIG: &str = "config.json";

/// Writes a model in Hugging Face's layout; `complete` adds files. The other ranks give rank 0 their parts of the weights.
///
/// # Errors
/// A model of another architecture; a folder that cannot be written; a rank that failed.
pub(crate) fn save_model(
    common: &Common,
    (model, optimizer): (&dyn LanguageModel, &dyn Optimizer),
    config: &DecoderConfig,
    path: &Path,
    complete: impl FnOnce(&Path) -> io::Result<()>,
) -> anyhow::Result<()> {
    let named = module::tensors(model);
    let named: HashMap<String, &Tensor> = named.into_iter().map(|named| (named.name, named.tensor)).collect();
    let mut tensors = Vec::new();
    for (name, _) in config.shapes() {
        let Some(tensor) = named.get(&name) else {
            bail!("the model has no `{name}`; it is not of the architecture of its folder");
        };
        tensors.push(optimizer.lazy_weight(name, tensor));
    }
    let files = ModelFiles::new(config, tensors, SHARD_BYTES)?;
    let saved = if common.is_first() { files.write(path, complete) } else { files.give() };
    Ok(saved?)
}

/// Writes what belongs to the model besides its weights into its folder, and gives `config.json` the base's fields that no weight depends
/// on.
pub(crate) fn complete(base: &Folder, companions: &CompanionFiles, out: &Path) -> anyhow::Result<()> {
    companions.write(out)?;
    let read = |path: PathBuf| -> anyhow::Result<Map<String, Value>> {
        let text = std::fs::read(&path).with_context(|| path.display().to_string())?;
        serde_json::from_slice(&text).with_context(|| path.display().to_string())
    };
    let (mut fields, saved) = (read(base.path().join(CONFIG))?, read(out.join(CONFIG))?);
    // What is written has both spellings, with the same values.
    fields.retain(|name, _| !ROPE.contains(&name.as_str()) && name != QUANTIZATION);
    for name in DTYPES {
        if let (Some(field), Some(dtype)) = (fields.get_mut(name), saved.get("dtype")) {
            *field = dtype.clone();
        }
    }
    fields.extend(saved);
    let path = out.join(CONFIG);
    let mut text = serde_json::to_vec_pretty(&fields)?;
    text.push(b'\n');
    std::fs::write(&path, text).with_context(|| format!("{} cannot be written", path.display()))
}
