//! Low-rank adaptation of a frozen model (LoRA, Hu et al., arXiv:2106.09685), compatible with PEFT's files.
//!
//! A projection y = x·Wᵀ + b stays frozen; s·x·Aᵀ·Bᵀ is added to it, and A `[r, in]` and B `[out, r]` are trained: about a million
//! parameters for a model with half a billion.
//!
//! | item | purpose |
//! |---|---|
//! | [`LoraLinear`], [`LoraLinearConfig`] | one projection with an adapter, in any model |
//! | [`Adapters`], [`LoraConfig`] | adapters of a whole model: install by name, switch, merge, save |
//! | [`Init`] | initialisation: Kaiming, Gaussian, PiSSA, OLoRA, orthogonal |
//! | [`LoraConfig::target_parameters`] | adapters on the experts of a mixture |
//! | [`TokenIndices`] | rows of new tokens, which are trained alone and replace those of the embedding and the head |
//! | [`peft`] | `adapter_config.json` and `adapter_model.safetensors`, reading and writing |
//!
//! Differences from PEFT:
//! - A layer saves x, which other layers save too, and r numbers per token for backward; the dropout mask is recomputed from its
//!   seed. The gradient of the frozen W is never computed.
//! - A merge never overwrites W, so unmerging restores it bit for bit; PEFT subtracts what it added.
//! - PiSSA and OLoRA do not change W: a separate low-rank term subtracts their initial product.
//! - `modules_to_save` and trained biases are also disabled, switched and unloaded with their adapters.
//! - A head that is tied to the embedding can be merged; the result tells that it is no longer tied.
//!
//! ```
//! use lora::LoraConfig;
//! use lora::models::module::{Input, LanguageModel};
//! use lora::models::{Llama, DecoderConfig};
//! use lora::runtime::autograd::backward;
//! use lora::tch::{Device, Kind, Tensor};
//!
//! # let folder = std::env::temp_dir().join(format!("lora-doc-{}", std::process::id()));
//! let base = DecoderConfig::llama(100, 16, 40, 2, 4);
//! let mut model = Llama::new(&base, (Kind::Float, Device::Cpu))?;
//! let config = LoraConfig {
//!     r: 8,
//!     lora_alpha: 16.0,
//!     target_modules: Some(["q_proj", "k_proj", "v_proj", "o_proj"].into()),
//!     seed: 42,
//!     ..LoraConfig::default()
//! };
//! let adapters = config.install(&mut model)?;
//!
//! let tokens = Tensor::from_slice(&[3i64, 1, 4, 1, 5]).view([1, 5]);
//! let loss = model.loss(&Input::training(&tokens), &tokens)?.mean(5)?;
//! backward(&[&loss])?;
//! // … an optimizer's step over `lora::models::module::trainable(&model)` …
//! adapters.save(&folder)?;
//! let _ = adapters.merge_and_unload(&mut model)?;
//! # std::fs::remove_dir_all(&folder).ok();
//! # Ok::<(), lora::Error>(())
//! ```

pub mod init;
pub mod peft;

mod adapted;
mod adapter;
mod adapters;
mod alternatives;
mod config;
mod dora;
mod embedding;
mod error;
mod experts;
mod linear;
mod matches;
mod options;
mod switch;
mod targets;

pub use adapted::{Adapted, field_prefix};
pub use adapters::{AdapterSwitch, Adapters, Disabled, Unloaded};
pub use alternatives::UnmatchedAlternative;
pub use config::{BiasTraining, Layers, LoraConfig, Names, TokenIndices};
pub use error::{Error, Result};
pub use init::Init;
pub use linear::{DEFAULT, LoraLinear};
pub use options::LoraLinearConfig;

// For its callers, who then depend on this crate alone.
pub use {models, runtime, tch};
