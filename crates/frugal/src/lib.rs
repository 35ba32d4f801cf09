//! Frugal: trains and fine-tunes language models on the memory at hand.
//!
//! This crate composes the techniques of the workspace. A [`Config`] says what to train and with which techniques; a [`Recipe`]
//! applies them to a model in the right order, and refuses combinations that do not work, naming both techniques:
//!
//! ```
//! use frugal::{Config, Recipe};
//! use models::{Llama, DecoderConfig};
//! use tch::{Device, Kind};
//!
//! let config: Config = "[adapter]\nr = 4\n[activations]\nplan = \"recompute\"".parse()?;
//! let model = Llama::new(&DecoderConfig::llama(64, 16, 40, 2, 4), (Kind::Float, Device::Cpu))?;
//! let (trainer, handles) = Recipe::new(&config)?.apply(Box::new(model))?.trainer(100)?;
//! # let _ = (trainer, handles);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | | what it gives |
//! |---|---|
//! | [`config`] | every setting, with units, read from and written to TOML |
//! | [`recipe`] | techniques on a model, and the trainer over it |
//! | [`planning`] | this machine's rates and a budget, for plans of offloading |
//! | [`rows`] | fine-tuning rows from a user's files: JSON, JSON lines, CSV, TSV, Parquet, text, token ids |
//! | [`run_folder`] | the files that a run writes: its record, losses, TensorBoard events |
//! | [`companion_files`] | what belongs to a model besides its weights: tokenizer, chat template, end tokens |
//! | [`tasks`] | GSM8K: problems, prompts, graders; questions with reference answers |
//! | [`loss_log`], [`text_stream`] | results of a training and of a generation |
//! | [`llama_cpp`] | log-probabilities that llama.cpp computes from GGUF files |
//!
//! # Features
//!
//! Each technique is a feature that re-exports its crate: `amp`, `fused-ce`, `lora`, `offload`, `sharding`, `swiglu-ckpt`. A program that
//! wants LoRA alone depends on `frugal = { default-features = false, features = ["lora"] }`, writes `frugal::lora::LoraConfig`, and compiles
//! no reader of files and no tokenizer. [`kernels`], [`models`], [`runtime`], [`training`] and [`tch`] are always there. `recipe`, the default,
//! adds everything in the table above. `clap` implements `clap::ValueEnum` for the enums of [`config`].

#[cfg(feature = "recipe")]
pub mod companion_files;
#[cfg(feature = "recipe")]
pub mod config;
#[cfg(feature = "recipe")]
pub mod error;
#[cfg(feature = "recipe")]
pub mod guide;
#[cfg(feature = "recipe")]
pub mod llama_cpp;
#[cfg(feature = "recipe")]
pub mod loss_log;
#[cfg(feature = "recipe")]
pub mod planning;
#[cfg(feature = "recipe")]
pub mod recipe;
#[cfg(feature = "recipe")]
pub mod rows;
#[cfg(feature = "recipe")]
pub mod run_folder;
#[cfg(feature = "recipe")]
pub mod tasks;
#[cfg(feature = "recipe")]
pub mod text_stream;

#[cfg(feature = "amp")]
pub use amp;
#[cfg(feature = "fused-ce")]
pub use fused_ce;
#[cfg(feature = "lora")]
pub use lora;
#[cfg(feature = "offload")]
pub use offload;
#[cfg(feature = "sharding")]
pub use sharding;
#[cfg(feature = "swiglu-ckpt")]
pub use swiglu_ckpt;
#[cfg(feature = "recipe")]
pub use {accounting, dataloading, gguf};
pub use {kernels, models, runtime, tch, training};

#[cfg(feature = "recipe")]
pub use {
    config::Config,
    error::{Error, Result},
    recipe::Recipe,
};
