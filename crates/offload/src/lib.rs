//! Layers, gradients and optimizer state that live elsewhere than they are used.
//!
//! A model of n layers needs one of them at a time. So the layers can live in the host's memory, or in files, and come to the device
//! when they run; with streams for the transfers the next ones come while one runs, and as long as a layer computes longer than it
//! loads, nothing is waited for:
//!
//! ```text
//! compute   │ layer 0   │ layer 1   │ layer 2   │ …      T tokens, P parameters: 2·P·T/F seconds
//! load      │ 1 │       │ 2 │       │ 3 │                s·P/B seconds for s bytes per parameter
//! ```
//!
//! [`Offload::apply`] does that to any model of [`models`]; embeddings, norms and head stay on the device.
//!
//! ```
//! use models::module::{Input, LanguageModel};
//! use models::{Llama, LlamaConfig};
//! use offload::{Offload, Options};
//! use tch::{Device, Kind, Tensor};
//!
//! let config = LlamaConfig { num_hidden_layers: 6, ..LlamaConfig::qwen2(100, 32, 64, 6, 4) };
//! let mut model = Llama::new(&config, (Kind::Float, Device::Cpu))?;
//! let tokens = Tensor::from_slice(&[3i64, 1, 4, 1]).view([1, 4]);
//! let before = model.loss(&Input::new(&tokens), &tokens)?.sum;
//!
//! let offload = Offload::apply(&mut model, &Options { ring: 3, ..Options::default() })?;
//! let loss = model.loss(&Input::new(&tokens), &tokens)?.sum;
//! assert_eq!(loss, before);
//! runtime::autograd::backward(&[&loss])?;
//! assert_eq!(offload.ring_bytes(), 3 * offload.layer_bytes());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Sources: ZeRO-Offload (Ren et al., arXiv:2101.06840), ZeRO-Infinity (arXiv:2104.07857), FlexGen (arXiv:2303.06865).

mod blocks;
mod engine;
mod error;
mod function;
mod home;
mod host_adam_w;
mod layout;
mod occupancy;
mod offload;
mod options;
mod schedule;
mod trace;

pub use blocks::{
    OffloadBlock, OffloadBlockWithCheckpointing, OffloadBlockWithFunction, OverlapOffloadBlock, ResidentBlock,
};
pub use engine::Counters;
pub use error::{Error, Result};
pub use home::Tier;
pub use host_adam_w::{HostAdamW, HostOptions, StateBytes, Stepped};
pub use offload::Offload;
pub use options::{Method, Options, Point, Probe};
pub use schedule::Direction;
pub use trace::{Lane, Span, overlap, to_chrome};
