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
//! | [`run_folder`] | what a run writes: its record, losses, TensorBoard events, a page |
//! | [`companion_files`] | what belongs to a model besides its weights: tokenizer, chat template, end tokens |
//! | [`tasks`] | GSM8K: problems, prompts, graders; questions with reference answers |
//! | [`display`], [`download_bar`], [`loss_log`], [`text_stream`] | progress and results of a training and of a generation |
//! | [`llama_cpp`] | log-probabilities that llama.cpp computes from GGUF files |
//! | [`environment`] | the machine and versions, for the records of measurements |
//!
//! The techniques are crates of their own, re-exported here: [`accounting`], [`amp`], [`dataloading`], [`fused_ce`], [`gguf`], [`kernels`],
//! [`lora`], [`models`], [`offload`], [`runtime`], [`sharding`], [`swiglu_ckpt`], [`training`], and with them [`tch`].

pub mod companion_files;
pub mod config;
pub mod display;
pub mod download_bar;
pub mod environment;
pub mod error;
pub mod guide;
pub mod llama_cpp;
pub mod loss_log;
pub mod planning;
pub mod recipe;
pub mod rows;
pub mod run_folder;
pub mod tasks;
pub mod text_stream;

pub use {
    accounting, amp, dataloading, fused_ce, gguf, kernels, lora, models, offload, runtime, sharding,
    swiglu_ckpt, tch, trace, training,
};

pub use config::Config;
pub use error::{Error, Result};
pub use recipe::Recipe;
