//! Models in Hugging Face's folder format: reading and writing.
//!
//! ```text
//! config.json                        sizes and options: DecoderConfig
//! model.safetensors                  the weights, or
//! model-00001-of-00002.safetensors …     shards of them, and
//! model.safetensors.index.json           the shard of each tensor
//! tokenizer.json                     (optional)
//! generation_config.json             (optional) end tokens
//! ```
//!
//! With the feature `gguf` a folder may have its weights in a GGUF file (`of_file`).
//!
//! Files are memory-mapped. After names and shapes are compared with `config.json`, the model is created without
//! initialisation, and each tensor's bytes are copied once from the file's pages, with a conversion if another dtype or device
//! is wanted; then the pages are released. So loading takes no memory beyond the model's own.
//!
//! ```
//! use models::hugging_face::{self, Folder};
//! use models::{Llama, DecoderConfig};
//! use tch::{Device, Kind, Tensor};
//!
//! let directory = tempfile::tempdir()?;
//! let path = directory.path().join("tiny");
//! let model = Llama::new(&DecoderConfig::qwen2(100, 16, 40, 2, 4), (Kind::Float, Device::Cpu))?;
//! hugging_face::save(&model, &path, hugging_face::SHARD_BYTES)?;
//!
//! let folder = Folder::open(&path)?;
//! assert_eq!(folder.kind()?, Kind::Float);
//! let halved = folder.load(Some(Kind::BFloat16), Device::Cpu)?;
//! assert_eq!(halved.decoder_config(), model.decoder_config());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bitsandbytes;
mod clamped_experts;
mod experts;
#[cfg(feature = "gguf")]
mod gguf_folder;
#[cfg(feature = "gguf")]
mod gguf_weights;
#[cfg(not(feature = "gguf"))]
#[path = "hugging_face/without_gguf.rs"]
mod gguf_weights;
mod index;
mod save;
mod weights;

use std::fs;
use std::path::{Path, PathBuf};

use files::atomic_write;
use kernels::nf4::Scales;
use kernels::quantized::blocks;
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

#[cfg(feature = "gguf")]
pub use gguf_folder::of_file;
pub use save::{ModelFiles, SHARD_BYTES, save, save_with};
pub(crate) use weights::Weights;

use crate::error::{self, Error, Result};
use crate::init::Init;
use crate::llama::{DecoderConfig, Llama};
use crate::module::Block;
#[cfg(feature = "gguf")]
use crate::stored_blocks;
use crate::strict_json;
use crate::tensors_file::TensorLocation;

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
const TOKENIZER: &str = "tokenizer.json";
const GENERATION: &str = "generation_config.json";

/// Hugging Face's prefix of a decoder's tensors.
const PREFIX: &str = "model.";

/// An open model folder: its configuration is parsed, and the names, dtypes and shapes of its weights are known.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    config: DecoderConfig,
    weights: Weights,
    has_own_head: bool,
    end_tokens: Vec<i64>,
    ends_of_config: Vec<i64>,
    pad_token: Option<i64>,
}

impl Folder {
    /// Opens a folder: reads everything but the weights' values, and compares the names and shapes of the weights with the
    /// configuration.
    ///
    /// # Errors
    /// A missing, invalid or truncated file, or one that contradicts another; an unknown architecture; weights that do not
    /// match the configuration. The message lists what is there, what is known, or all differences.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            let reason = if path.exists() {
                format!("a file; expected the folder that contains {CONFIG}")
            } else {
                "the folder does not exist".to_owned()
            };
            return Err(Error::file(path, reason));
        }
        atomic_write::read(path, || Self::read(path))
    }

    fn read(path: &Path) -> Result<Self> {
        let config_path = path.join(CONFIG);
        if !config_path.is_file() {
            return Err(Error::file(path, format!("{CONFIG} is missing; {}", contents(path))));
        }
        let mut config = DecoderConfig::read(&config_path).map_err(error::decoder)?;
        let mut weights = Weights::open(path)?;
        weights.leave_out_shared_keys(&config);
        let tied = weights.ties(config.tie_word_embeddings)?;
        let has_own_head = config.tie_word_embeddings && !tied;
        config.tie_word_embeddings = tied;
        weights.check_against(&config, &config_path)?;
        let raw_config = read_json(&config_path)?;
        let generation_path = path.join(GENERATION);
        let generation = if generation_path.is_file() { read_json(&generation_path)? } else { Value::Null };
        // generation_config.json takes precedence over the fields that older folders have in config.json.
        let tokens = |field: &str| -> Result<Vec<i64>> {
            match tokens(&generation_path, &generation, field)? {
                Some(tokens) => Ok(tokens),
                None => Ok(tokens_of_config(&config_path, &raw_config, field)?),
            }
        };
        let end_tokens = tokens("eos_token_id")?;
        let ends_of_config = tokens_of_config(&config_path, &raw_config, "eos_token_id")?;
        let pad_token = tokens("pad_token_id")?.first().copied();
        let path = path.to_owned();
        Ok(Self { path, config, weights, has_own_head, end_tokens, ends_of_config, pad_token })
    }

    /// Returns the folder of a model whose vocabulary has `rows` rows, for new tokens: the embedding and a head of its own get further
    /// rows, each the mean of the files' as it is loaded (in the blocks of a GGUF file zeros). Fewer rows than the files' change nothing.
    #[must_use]
    pub fn with_vocabulary(mut self, rows: i64) -> Self {
        self.config.vocab_size = self.config.vocab_size.max(rows);
        self.weights.vocabulary = Some(self.config.vocab_size);
        self
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the configuration in `config.json`. Its `tie_word_embeddings` is false also where the files have a head with other values
    /// than the embedding's, which is used, as transformers 5 does (transformers 4 ignores such a head).
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Whether `config.json` ties the head to the embedding, but the files have a head with other values.
    pub fn has_own_head(&self) -> bool {
        self.has_own_head
    }

    /// Returns the parts of the model that the folder has and that are not read, such as the part that reads images; empty for most models.
    pub fn parts_not_read(&self) -> Vec<&'static str> {
        self.weights.parts_not_read()
    }

    /// Returns the tokens that end a text (`eos_token_id` of `generation_config.json`, else of `config.json`); empty if neither has
    /// any.
    pub fn end_tokens(&self) -> &[i64] {
        &self.end_tokens
    }

    /// Returns the tokens that end a text by either of these files: those of `generation_config.json` first.
    pub fn all_end_tokens(&self) -> Vec<i64> {
        let others = self.ends_of_config.iter().filter(|end| !self.end_tokens.contains(end));
        self.end_tokens.iter().chain(others).copied().collect()
    }

    /// Returns the padding token (`pad_token_id`, from the same files).
    pub fn pad_token(&self) -> Option<i64> {
        self.pad_token
    }

    /// Returns the GGUF file that has the weights, for a folder of [`of_file`].
    #[cfg(feature = "gguf")]
    pub fn gguf_file(&self) -> Option<&gguf::ModelFile> {
        self.weights.gguf.as_ref().map(gguf_weights::GgufWeights::file)
    }

    /// Returns the bytes of each matrix as [`Folder::load`] keeps it in [`blocks::KIND`], by the model's name; `None` for a folder that is
    /// not over a GGUF file.
    ///
    /// # Errors
    /// A type of blocks that products do not read.
    #[cfg(feature = "gguf")]
    pub fn matrix_bytes(&self) -> Result<Option<Vec<(String, u64)>>> {
        self.gguf_file().map(|file| stored_blocks::matrix_bytes(file, self.config.vocab_size)).transpose()
    }

    /// Returns the path of `tokenizer.json`, if it exists.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        Some(self.path.join(TOKENIZER)).filter(|path| path.is_file())
    }

    /// Returns the path of `generation_config.json`, if it exists.
    pub fn generation_config(&self) -> Option<PathBuf> {
        Some(self.path.join(GENERATION)).filter(|path| path.is_file())
    }

    /// Returns the dtype of the weights' tensors; `torch_dtype` in `config.json` is ignored. For weights that bitsandbytes quantized it is
    /// a dtype of [`kernels::nf4`], whatever the others have.
    ///
    /// # Errors
    /// Weights of several dtypes; the message counts each.
    pub fn kind(&self) -> Result<Kind> {
        self.weights.kind()
    }

    /// Returns the dtype to load the model in: `kind`, or that of the files for `None`; for a model in NF4 with the files' form of scales,
    /// if they have NF4 weights.
    ///
    /// # Errors
    /// A dtype that models do not have; as [`Folder::kind`].
    pub fn kind_or(&self, kind: Option<Kind>) -> Result<Kind> {
        let kind = kind.map_or_else(|| self.kind(), Ok)?;
        weights::check_kind(kind)?;
        let stored =
            self.kind().ok().filter(|stored| Scales::of(*stored).is_some() && Scales::of(kind).is_some());
        Ok(stored.unwrap_or(kind))
    }

    /// Loads the model in a dtype (`None`: the files') onto a device. Needs no memory beyond the model's own; on a GPU also
    /// what libtorch needs to convert one tensor.
    ///
    /// With a dtype of [`kernels::nf4`] the projections of the blocks are quantized as they are read, from their values in bf16, and what
    /// else there is gets bf16: that takes the memory of one matrix in bf16 beside the model's own. Files of bitsandbytes are read as they
    /// are; in a floating dtype they are dequantized.
    ///
    /// In [`blocks::KIND`] the matrices of a folder over a GGUF file stay in the file's blocks (`stored_blocks`).
    ///
    /// # Errors
    /// A dtype that models do not compute in; `None` for weights of several dtypes; too little memory; a device that does not
    /// exist.
    pub fn load(&self, kind: Option<Kind>, device: Device) -> Result<Llama> {
        if kind == Some(blocks::KIND) {
            return self.assemble_blocks(device, &mut |_, block| Ok(block));
        }
        let kind = self.kind_or(kind)?;
        // Initial values would be overwritten: every tensor of the model is in the files, which `open` has checked and
        // `copy_into` checks again before it copies.
        let model = Llama::with_init(&self.config, Init::Uninitialised, (kind, device))?;
        self.load_into(&model)?;
        Ok(model)
    }

    /// [`Folder::load`] in [`blocks::KIND`], passing each block with its number to `wrap` once it is read and before the next one is, as
    /// [`Llama::assemble`].
    ///
    /// # Errors
    /// A folder that is not over a GGUF file; a type of blocks that products do not read; a device other than the CPU; those of `wrap`.
    #[cfg_attr(not(feature = "gguf"), allow(unused_variables, reason = "no folder is over a GGUF file"))]
    pub fn assemble_blocks(
        &self,
        device: Device,
        wrap: &mut dyn FnMut(usize, Box<dyn Block>) -> Result<Box<dyn Block>>,
    ) -> Result<Llama> {
        #[cfg(feature = "gguf")]
        if let Some(file) = self.gguf_file() {
            return stored_blocks::assemble(file, self.config.vocab_size, device, wrap);
        }
        Err(weights::no_blocks())
    }

    /// Returns the location of a tensor's values, by the model's name (`layers.0.mlp.up_proj.weight`); `None` for a name that
    /// the files do not contain.
    pub fn location(&self, name: &str) -> Option<TensorLocation> {
        self.weights.location(name)
    }

    /// Returns whether [`Folder::location`] finds every tensor: not where files have some in another form, as gpt-oss's experts, weights in NF4,
    /// and the blocks of a GGUF file.
    pub fn has_locations(&self) -> bool {
        self.weights.have_locations()
    }

    /// Copies only the tensors whose name `is_wanted`, as [`Folder::load_into`]. The names and shapes of all are compared.
    ///
    /// # Errors
    /// As [`Folder::load_into`].
    pub fn load_filtered(&self, model: &Llama, is_wanted: &dyn Fn(&str) -> bool) -> Result<()> {
        self.weights.copy_some(model, is_wanted)
    }

    /// Copies the values of one tensor, by the model's name, into `target`, of its shape and any dtype and device. Returns false for a
    /// name that the files do not contain.
    ///
    /// # Errors
    /// Another shape; those of libtorch.
    pub fn load_tensor(&self, name: &str, target: &Tensor) -> Result<bool> {
        self.weights.copy_one(name, target)
    }

    /// Copies the weights into an existing model, whose parts may be replaced by others with the same names. If anything does
    /// not match, nothing is copied.
    ///
    /// # Errors
    /// All names that are missing, unexpected, or of another shape.
    pub fn load_into(&self, model: &Llama) -> Result<()> {
        self.weights.copy_into(model)
    }
}

/// Copies weights into `model`, whose parts may be replaced by others with the same names. `path` is a safetensors file, or a folder
/// with one or with shards and their index; names are Hugging Face's or this crate's. Values are copied from the file's pages into
/// the model's tensors, of any dtype and device. If anything does not match, nothing is copied. A tied model ignores a copy of the
/// embedding under the head's name.
///
/// # Errors
/// Missing or truncated files, or files that contradict each other; a head with other values for a tied model; those of
/// [`load_state_dict`](crate::state_dict::load_state_dict).
pub fn load_weights(model: &Llama, path: &Path) -> Result<()> {
    let mut weights = Weights::open(path)?;
    if model.decoder_config().tie_word_embeddings && !weights.ties(true)? {
        let reason = "its head has other values than the embedding, and the model ties them; create the model with \
                      `tie_word_embeddings` false";
        return Err(Error::file(path, reason));
    }
    weights.copy_into(model)
}

/// Returns Hugging Face's name of a tensor of a [`Llama`].
pub fn tensor_name(name: &str) -> String {
    if name.starts_with("lm_head") { name.to_owned() } else { format!("{PREFIX}{name}") }
}

fn read_json(path: &Path) -> Result<Value> {
    let text = fs::read_to_string(path).map_err(|cause| Error::file(path, cause))?;
    // Anything but an object counts as an object without fields.
    let fields: Map<String, Value> =
        strict_json::from_str(&text).map_err(|cause| Error::file(path, cause))?;
    Ok(Value::Object(fields))
}

/// Reads a field that holds a token, a list of tokens, or nothing.
fn tokens(path: &Path, json: &Value, field: &str) -> Result<Option<Vec<i64>>> {
    let refuse = |value: &Value| {
        Error::file(path, format!("`{field}` is {value}; expected a token or a list of tokens"))
    };
    match &json[field] {
        Value::Null => Ok(None),
        Value::Array(values) => values
            .iter()
            .map(|value| value.as_i64().ok_or_else(|| refuse(value)))
            .collect::<Result<_>>()
            .map(Some),
        value => Ok(Some(vec![value.as_i64().ok_or_else(|| refuse(value))?])),
    }
}

fn tokens_of_config(path: &Path, json: &Value, field: &str) -> Result<Vec<i64>> {
    Ok(tokens(path, json, field)?.unwrap_or_default())
}

/// Describes a folder's contents for an error.
fn contents(folder: &Path) -> String {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    match (names.len(), names.len().saturating_sub(12)) {
        (0, _) => "the folder is empty".to_owned(),
        (_, 0) => format!("the folder contains {}", names.join(", ")),
        (_, more) => format!("the folder contains {} and {more} more", names[..12].join(", ")),
    }
}
