//! Models in Hugging Face's folders, in and out.
//!
//! ```text
//! config.json                        sizes and options: LlamaConfig
//! model.safetensors                  the weights, or
//! model-00001-of-00002.safetensors …     shards of them with
//! model.safetensors.index.json           which shard has which tensor
//! tokenizer.json                     (optional)
//! generation_config.json             (optional) tokens that end a text
//! ```
//!
//! Files are mapped. A model is made without first values, after names and shapes have been compared with `config.json`, and
//! each tensor's bytes go once from the file's pages into it, converted on the way where another dtype or device is wanted; the
//! pages are given back at once. So loading takes the memory of the model and no more.
//!
//! ```
//! use models::hugging_face::{self, Folder};
//! use models::{Llama, LlamaConfig};
//! use tch::{Device, Kind};
//!
//! let place = tempfile::tempdir()?;
//! let path = place.path().join("tiny");
//! let model = Llama::new(&LlamaConfig::qwen2(100, 16, 40, 2, 4), (Kind::Float, Device::Cpu))?;
//! hugging_face::save(&model, &path, hugging_face::SHARD_BYTES)?;
//!
//! let folder = Folder::open(&path)?;
//! assert_eq!(folder.kind()?, Kind::Float);
//! let halved = folder.load(Some(Kind::BFloat16), Device::Cpu)?;
//! assert_eq!(halved.llama_config(), model.llama_config());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod index;
mod save;
mod weights;

use std::fs;
use std::path::{Path, PathBuf};

use runtime::atomic_write;
use serde_json::{Map, Value};
use tch::{Device, Kind};

pub use save::{SHARD_BYTES, save, save_with};
pub(crate) use weights::Weights;

use crate::error::Result;
use crate::init::Init;
use crate::llama::{Llama, LlamaConfig};
use crate::strict_json;
use crate::tensors_file::{Stored, file_error};

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
const TOKENIZER: &str = "tokenizer.json";
const GENERATION: &str = "generation_config.json";

/// A model's folder, open: its configuration is read, and its weights' names, dtypes and shapes are known.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    config: LlamaConfig,
    weights: Weights,
    end_tokens: Vec<i64>,
    pad_token: Option<i64>,
}

impl Folder {
    /// Opens a folder: reads everything but the weights' values, and compares names and shapes of the weights with the
    /// configuration.
    ///
    /// # Errors
    /// A file that is missing (what is there is listed), broken, truncated, or contradicts another, by name; an architecture
    /// that is not known (those that are, are listed); weights that do not fit the configuration, all of them listed.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            let reason = if path.exists() {
                format!("a file; expected the folder that has {CONFIG}")
            } else {
                "there is no such folder".to_owned()
            };
            return Err(file_error(path, reason));
        }
        atomic_write::read(path, || Self::read(path))
    }

    fn read(path: &Path) -> Result<Self> {
        let config_path = path.join(CONFIG);
        if !config_path.is_file() {
            return Err(file_error(path, format!("{CONFIG} is missing; {}", contents(path))));
        }
        let config = LlamaConfig::read(&config_path)?;
        let weights = Weights::open(path)?;
        weights.check_against(&config, &config_path)?;
        let own = read_json(&config_path)?;
        let generation_path = path.join(GENERATION);
        let generation = if generation_path.is_file() { read_json(&generation_path)? } else { Value::Null };
        // What generation_config.json says goes before what older folders have in config.json.
        let tokens = |field: &str| -> Result<Vec<i64>> {
            match tokens(&generation_path, &generation, field)? {
                Some(tokens) => Ok(tokens),
                None => Ok(tokens_of_config(&config_path, &own, field)?),
            }
        };
        let end_tokens = tokens("eos_token_id")?;
        let pad_token = tokens("pad_token_id")?.first().copied();
        Ok(Self { path: path.to_owned(), config, weights, end_tokens, pad_token })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What `config.json` says.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// The tokens that end a text (`eos_token_id` of `generation_config.json`, else of `config.json`); none where neither says.
    pub fn end_tokens(&self) -> &[i64] {
        &self.end_tokens
    }

    /// The token that fills rows up (`pad_token_id`, from the same files).
    pub fn pad_token(&self) -> Option<i64> {
        self.pad_token
    }

    /// `tokenizer.json`, where there is one.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        Some(self.path.join(TOKENIZER)).filter(|path| path.is_file())
    }

    /// `generation_config.json`, where there is one.
    pub fn generation_config(&self) -> Option<PathBuf> {
        Some(self.path.join(GENERATION)).filter(|path| path.is_file())
    }

    /// The dtype of the weights: that of the tensors themselves, whatever `config.json` says of it.
    ///
    /// # Errors
    /// Weights of several dtypes, with their numbers.
    pub fn kind(&self) -> Result<Kind> {
        self.weights.kind()
    }

    /// The model, in a dtype (that of the file for `None`) on a device. Takes no memory beside the model's own, but on a GPU what
    /// libtorch takes to convert one tensor.
    ///
    /// # Errors
    /// A dtype that no model computes in; `None` for weights of several dtypes; too little memory; a device that is not there.
    pub fn load(&self, kind: Option<Kind>, device: Device) -> Result<Llama> {
        let kind = kind.map_or_else(|| self.kind(), Ok)?;
        weights::check_kind(kind)?;
        // What is drawn here would be overwritten: every tensor of the model is in the files, which `open` has seen and
        // `copy_into` sees again before it copies.
        let model = Llama::with_init(&self.config, Init::Uninitialised, (kind, device))?;
        self.load_into(&model)?;
        Ok(model)
    }

    /// Where the values of a tensor lie, by the model's name of it (`layers.0.mlp.up_proj.weight`); `None` for a name that the files
    /// do not have.
    pub fn stored(&self, name: &str) -> Option<Stored> {
        self.weights.stored(name)
    }

    /// [`Folder::load_into`] for the tensors whose names `is_wanted`, for a model whose others lie elsewhere. Names and shapes of all are
    /// compared.
    ///
    /// # Errors
    /// As [`Folder::load_into`].
    pub fn load_some(&self, model: &Llama, is_wanted: &dyn Fn(&str) -> bool) -> Result<()> {
        self.weights.copy_some(model, is_wanted)
    }

    /// Copies the weights into a model that is there, whose parts may have been replaced by others of the same names. Nothing is
    /// copied unless everything fits.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) with all names that are missing, unexpected, or of another shape.
    pub fn load_into(&self, model: &Llama) -> Result<()> {
        self.weights.copy_into(model)
    }
}

fn read_json(path: &Path) -> Result<Value> {
    let text = fs::read_to_string(path).map_err(|cause| file_error(path, cause.to_string()))?;
    // Anything but an object would be one that has no field.
    let fields: Map<String, Value> =
        strict_json::from_str(&text).map_err(|cause| file_error(path, cause.to_string()))?;
    Ok(Value::Object(fields))
}

/// A field that holds a token, a list of them, or nothing.
fn tokens(path: &Path, json: &Value, field: &str) -> Result<Option<Vec<i64>>> {
    let refuse =
        |value: &Value| file_error(path, format!("`{field}` is {value}; expected a token or a list of them"));
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

/// What is in a folder, in words.
fn contents(folder: &Path) -> String {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    match (names.len(), names.len().saturating_sub(12)) {
        (0, _) => "the folder is empty".to_owned(),
        (_, 0) => format!("there is {}", names.join(", ")),
        (_, more) => format!("there is {} and {more} more", names[..12].join(", ")),
    }
}
