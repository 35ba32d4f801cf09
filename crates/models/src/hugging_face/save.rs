//! Writing a model to a folder.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use runtime::atomic_write;
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use super::{CONFIG, INDEX, SINGLE, tensor_name};
use crate::error::{Error, Result};
use crate::llama::Llama;
use crate::state_dict::{check_fit, state_dict};
use crate::tensors_file::{self, dtype_name, file_error};

/// Default size of a shard in bytes: 5 GB, as in Hugging Face's writers.
pub const SHARD_BYTES: u64 = 5_000_000_000;

/// Metadata that readers of the format require.
const METADATA: [(&str, &str); 1] = [("format", "pt")];

/// Writes `config.json` and the weights, in their dtypes and under Hugging Face's names: one `model.safetensors`, or shards
/// with an index if the values exceed `max_shard_bytes`. A tensor is never split: one that is larger gets its own shard.
///
/// The folder is created if needed. Weights of an earlier model in it are replaced, other files stay. All files become visible
/// together ([`atomic_write::Folder`]), so that a reader finds either the earlier model or this one.
///
/// # Errors
/// [`Error::State`] for a model with replaced parts whose tensors differ from its configuration's (merge adapters first); a
/// limit of 0; a folder that cannot be written, or is full.
pub fn save(model: &Llama, folder: &Path, max_shard_bytes: u64) -> Result<()> {
    save_with(model, folder, max_shard_bytes, |_| Ok(()))
}

/// [`save`], with additional files: `complete` gets the temporary folder with `config.json` and the weights before it is
/// renamed, and may change it.
///
/// # Errors
/// As [`save`]; those of `complete`.
pub fn save_with(
    model: &Llama,
    folder: &Path,
    max_shard_bytes: u64,
    complete: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<()> {
    if max_shard_bytes == 0 {
        let reason = "`max_shard_bytes` is 0; expected at least 1".to_owned();
        return Err(Error::Config { what: "hugging_face::save", reason });
    }
    let state = state_dict(model);
    let given: BTreeMap<&str, Vec<i64>> = state.iter().map(|(name, x)| (&**name, x.size())).collect();
    check_fit(&model.llama_config().shapes(), &given, "the saved model")?;
    drop(given);
    let tensors: Vec<(String, Tensor)> =
        state.into_iter().map(|(name, tensor)| (tensor_name(&name), tensor)).collect();

    let failed = |cause: io::Error| file_error(folder, format!("cannot be written: {cause}"));
    let new = atomic_write::Folder::beside(folder).map_err(failed)?;
    write_weights(new.path(), &tensors, max_shard_bytes)?;
    write_json(&new.path().join(CONFIG), &config(model, &tensors))?;
    complete(new.path()).map_err(failed)?;
    let is_weights = |name: &str| [INDEX, SINGLE].contains(&name) || is_shard(name);
    new.publish(&[INDEX, SINGLE], &is_weights).map_err(failed)
}

/// Writes the weights to one file, or to shards with an index.
fn write_weights(stage: &Path, tensors: &[(String, Tensor)], limit: u64) -> Result<()> {
    let shards = shards(tensors, limit);
    if let [_] = shards[..] {
        return tensors_file::write_file(&stage.join(SINGLE), tensors, &METADATA);
    }
    let mut weight_map = Map::new();
    for (number, shard) in (1..).zip(&shards) {
        let file = format!("model-{number:05}-of-{:05}.safetensors", shards.len());
        weight_map.extend(shard.iter().map(|(name, _)| (name.clone(), json!(file))));
        tensors_file::write_file(&stage.join(&file), shard, &METADATA)?;
    }
    weight_map.sort_keys();
    let total: u64 = tensors.iter().map(|(_, tensor)| bytes(tensor)).sum();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    write_json(&stage.join(INDEX), &index)
}

/// Divides the tensors, in order, into shards within the limit; at least one.
fn shards(tensors: &[(String, Tensor)], limit: u64) -> Vec<&[(String, Tensor)]> {
    let (mut shards, mut start, mut size) = (Vec::new(), 0, 0u64);
    for (at, (_, tensor)) in tensors.iter().enumerate() {
        let more = bytes(tensor);
        if at > start && size.saturating_add(more) > limit {
            shards.push(&tensors[start..at]);
            (start, size) = (at, 0);
        }
        size = size.saturating_add(more);
    }
    shards.push(&tensors[start..]);
    shards
}

fn bytes(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}

/// Returns the configuration with the fields that transformers also needs.
fn config(model: &Llama, tensors: &[(String, Tensor)]) -> Value {
    let mut config = serde_json::to_value(model.llama_config()).unwrap_or_default();
    config["architectures"] = json!([model.llama_config().family.architecture()]);
    let kinds: Vec<Kind> = tensors.iter().map(|(_, tensor)| tensor.kind()).collect();
    if let Some(first) = kinds.first().filter(|first| kinds.iter().all(|kind| kind == *first)) {
        config["dtype"] = json!(dtype_name(*first));
    }
    config
}

fn write_json(path: &Path, json: &Value) -> Result<()> {
    atomic_write::file(path, |out| {
        serde_json::to_writer_pretty(&mut *out, json)?;
        out.write_all(b"\n")
    })
    .map_err(|cause| file_error(path, format!("cannot be written: {cause}")))
}

/// Whether a name has the form `model-00001-of-00002.safetensors`.
fn is_shard(name: &str) -> bool {
    let numbers = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.and_then(|rest| rest.split_once("-of-")).is_some_and(|(a, b)| digits(a) && digits(b))
}
