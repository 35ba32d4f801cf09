//! Writing a model to a folder.

use std::io;
use std::path::Path;

use files::atomic_write;
use kernels::nf4::{Scales, is_nf4};
use kernels::quantized::blocks::BlockType;
use kernels::quantized::matrix_shape;
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use super::{CONFIG, INDEX, SINGLE, bitsandbytes, clamped_experts, tensor_name};
use crate::error::{Error, Result};
use crate::llama::{DecoderConfig, Llama};
use crate::state_dict::{check_fit, state_dict};
use crate::tensors_file::{self, Content, LazyTensor, dtype_name};

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
/// Weights in NF4 are written as bitsandbytes writes them, with `quantization_config` in `config.json`, so that transformers reads them.
///
/// # Errors
/// A model with replaced parts whose tensors differ from its configuration's (merge adapters first); a
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
    let state = state_dict(model);
    if let Some((name, _)) = state.iter().find(|(_, tensor)| BlockType::of(tensor).is_some()) {
        let reason = format!(
            "`{name}` is in the blocks of a GGUF file, which safetensors do not have; load the model in bfloat16, and save that"
        );
        return Err(Error::invalid("hugging_face::save", reason));
    }
    if state.iter().any(|(_, tensor)| is_nf4(tensor)) {
        return quantized(model.decoder_config(), &state, max_shard_bytes)?.write(folder, complete);
    }
    ModelFiles::new(model.decoder_config(), LazyTensor::from_tensors(&state), max_shard_bytes)?
        .write(folder, complete)
}

/// The files of a model with weights in NF4, as bitsandbytes has them.
fn quantized(config: &DecoderConfig, state: &[(String, Tensor)], limit: u64) -> Result<ModelFiles<'static>> {
    if config.family.facts().has_clamped_experts {
        let reason = format!(
            "a `{}` in NF4 cannot be saved, because bitsandbytes quantizes no experts that are one tensor; load it in bfloat16, and save that",
            config.family.model_type()
        );
        return Err(Error::invalid("hugging_face::save", reason));
    }
    let shape = |tensor: &Tensor| matrix_shape(tensor).map_or_else(|| tensor.size(), |shape| shape.to_vec());
    let given = state.iter().map(|(name, tensor)| (&**name, shape(tensor))).collect();
    check_fit(&config.shapes(), &given, "the saved model")?;
    let nested = state.iter().any(|(_, tensor)| tensor.kind() == Scales::Nested.kind());
    let mut tensors = Vec::new();
    for (name, tensor) in state {
        let name = tensor_name(name);
        if is_nf4(tensor) {
            tensors.extend(bitsandbytes::tensors(&name, tensor)?);
        } else {
            tensors.push((name, tensor.shallow_clone()));
        }
    }
    let dense = state.iter().filter(|(_, tensor)| !is_nf4(tensor));
    let dense: Vec<_> = dense.map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
    let mut json = config_json(config, &LazyTensor::from_tensors(&dense));
    json[bitsandbytes::CONFIG_FIELD] = bitsandbytes::config(nested);
    ModelFiles::divided(json, LazyTensor::from_tensors(&tensors), limit)
}

/// The files of a model whose weights are brought when they are written, because other processes have parts of them: one process
/// writes, and all others give.
#[derive(Debug)]
pub struct ModelFiles<'a> {
    config: Value,
    /// The name of each file of weights, and its content.
    weights: Vec<(String, Content<'a>)>,
    index: Option<Value>,
}

impl<'a> ModelFiles<'a> {
    /// Divides the weights, under the model's names and in its order, into files of up to `max_shard_bytes`.
    ///
    /// # Errors
    /// Weights that are not those of the configuration; a limit of 0.
    pub fn new(config: &DecoderConfig, tensors: Vec<LazyTensor<'a>>, max_shard_bytes: u64) -> Result<Self> {
        let given = tensors.iter().map(|tensor| (tensor.name(), tensor.shape().to_vec())).collect();
        check_fit(&config.shapes(), &given, "the saved model")?;
        let name = |tensor: LazyTensor<'a>| {
            let name = tensor_name(tensor.name());
            tensor.renamed(name)
        };
        let tensors = clamped_experts::join(config, tensors.into_iter().map(name).collect())?;
        Self::divided(config_json(config, &tensors), tensors, max_shard_bytes)
    }

    /// Divides tensors, under the files' names, into files.
    fn divided(config: Value, tensors: Vec<LazyTensor<'a>>, max_shard_bytes: u64) -> Result<Self> {
        if max_shard_bytes == 0 {
            let reason = "`max_shard_bytes` is 0; expected at least 1".to_owned();
            return Err(Error::invalid("hugging_face::save", reason));
        }
        let total: u64 = tensors.iter().map(LazyTensor::bytes).sum();
        let mut shards = shards(tensors, max_shard_bytes);
        let content = |shard| Content::new(shard, &METADATA);
        if shards.len() == 1 {
            let weights = shards.drain(..).map(|only| (SINGLE.to_owned(), content(only))).collect();
            return Ok(Self { config, weights, index: None });
        }
        let (count, mut weights, mut weight_map) = (shards.len(), Vec::new(), Map::new());
        for (number, shard) in (1..).zip(shards) {
            let file = format!("model-{number:05}-of-{count:05}.safetensors");
            weight_map.extend(shard.iter().map(|tensor| (tensor.name().to_owned(), json!(file))));
            weights.push((file, content(shard)));
        }
        weight_map.sort_keys();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        Ok(Self { config, weights, index: Some(index) })
    }

    /// Writes the files to a folder, as [`save_with`]. After an error, brings the weights that are left, so that no process waits for
    /// this one.
    ///
    /// # Errors
    /// A folder that cannot be written, or is full; those of `complete` and of the values.
    pub fn write(mut self, folder: &Path, complete: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
        let written = self.write_all(folder, complete);
        if written.is_err() {
            // The first error is the one to report.
            let _ = self.give_rest();
        }
        written
    }

    /// Gives this process's parts of the weights to the one that writes.
    ///
    /// # Errors
    /// A process that failed.
    pub fn give(mut self) -> Result<()> {
        self.give_rest()
    }

    fn give_rest(&mut self) -> Result<()> {
        self.weights.iter_mut().try_for_each(|(_, content)| content.give())
    }

    fn write_all(&mut self, folder: &Path, complete: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
        let failed = |cause: io::Error| Error::file(folder, format!("cannot be written: {cause}"));
        let new = atomic_write::Folder::beside(folder).map_err(failed)?;
        for (file, content) in &mut self.weights {
            tensors_file::write_content(&new.path().join(file), content)?;
        }
        if let Some(index) = &self.index {
            write_json(&new.path().join(INDEX), index)?;
        }
        write_json(&new.path().join(CONFIG), &self.config)?;
        complete(new.path()).map_err(failed)?;
        let is_weights = |name: &str| [INDEX, SINGLE].contains(&name) || is_shard(name);
        new.publish(&[INDEX, SINGLE], &is_weights).map_err(failed)
    }
}

/// Divides the tensors, in order, into shards within the limit; at least one.
fn shards(tensors: Vec<LazyTensor<'_>>, limit: u64) -> Vec<Vec<LazyTensor<'_>>> {
    let (mut shards, mut shard, mut size) = (Vec::new(), Vec::new(), 0u64);
    for tensor in tensors {
        if !shard.is_empty() && size.saturating_add(tensor.bytes()) > limit {
            shards.push(std::mem::take(&mut shard));
            size = 0;
        }
        size = size.saturating_add(tensor.bytes());
        shard.push(tensor);
    }
    shards.push(shard);
    shards
}

/// Returns the configuration with the fields that transformers also needs.
fn config_json(config: &DecoderConfig, tensors: &[LazyTensor<'_>]) -> Value {
    let mut json = serde_json::to_value(config).unwrap_or_default();
    if let Value::Object(fields) = &mut json {
        // Of the files that the weights were read from.
        fields.shift_remove(bitsandbytes::CONFIG_FIELD);
    }
    json["architectures"] = json!([config.family.architecture()]);
    let is_of_model = |tensor: &&LazyTensor<'_>| !decoder::is_kept_wide(tensor.name());
    let kinds: Vec<Kind> = tensors.iter().filter(is_of_model).map(LazyTensor::kind).collect();
    if let Some(first) = kinds.first().filter(|first| kinds.iter().all(|kind| kind == *first)) {
        json["dtype"] = json!(dtype_name(*first));
    }
    json
}

fn write_json(path: &Path, json: &Value) -> Result<()> {
    atomic_write::file(path, |out| {
        serde_json::to_writer_pretty(&mut *out, json)?;
        out.write_all(b"\n")
    })
    .map_err(|cause| Error::file(path, format!("cannot be written: {cause}")))
}

/// Whether a name has the form `model-00001-of-00002.safetensors`.
fn is_shard(name: &str) -> bool {
    let numbers = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.and_then(|rest| rest.split_once("-of-")).is_some_and(|(a, b)| digits(a) && digits(b))
}
