//! SwiGLU with activation checkpointing: an MLP that keeps or recomputes its activations.
//!
//! FFN(x) = (SiLU(x·W) ⊙ x·V)·U, with W and V of `[H, F]` and U of `[F, H]`, is the feed-forward layer of Llama and Qwen, and takes
//! most of a decoder's activation memory: a graph of separate operators keeps H + 4F elements per token for backward. This crate's
//! hand-written backward lets the caller choose what to keep, per layer, by [`CheckpointLevel`]:
//!
//! | level | kept per token | extra matrix products (of 9) |
//! |---|---|---|
//! | eager: separate operators | H + 4F | 0 |
//! | [`SaveAll`](CheckpointLevel::SaveAll) | H + 3F | 0 |
//! | [`SaveGateUp`](CheckpointLevel::SaveGateUp) | H + 2F | 0 |
//! | [`SaveOne`](CheckpointLevel::SaveOne) | H + F | 1 |
//! | [`InputOnly`](CheckpointLevel::InputOnly) | H | 2 |
//! | [`InputOnlyTiled`](CheckpointLevel::InputOnlyTiled) | H, with temporaries of a chosen size | 2 |
//!
//! All levels compute the same function; in fp32 all but the tiled one give the same bits.
//!
//! ```
//! use swiglu_ckpt::{CheckpointLevel, SwigluConfig, SwigluMlp};
//! use swiglu_ckpt::runtime::autograd::backward;
//! use swiglu_ckpt::tch::{Kind, Tensor, kind};
//!
//! let config = SwigluConfig { level: CheckpointLevel::InputOnly, ..SwigluConfig::new(512, 2048) };
//! let mlp = SwigluMlp::new(&config)?;
//! let x = Tensor::randn([2, 16, 512], kind::FLOAT_CPU).set_requires_grad(true);
//! let y = mlp.forward(&x)?;
//! backward(&[&y.sum(Kind::Float)])?;
//! assert_eq!(x.grad().size(), [2, 16, 512]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`CheckpointLevel::install`] replaces the MLPs of GPT-2 and of every Llama-like model with a SwiGLU. [`function`] documents the mathematics and
//! what each level keeps. `experiments swiglu-ckpt bench` measures time and memory of every level.

mod arguments;
pub mod error;
pub mod function;
pub mod gelu;
mod install;
pub mod level;
pub mod mlp;

pub use error::{Error, Result};
pub use function::swiglu;
pub use gelu::feed_forward;
pub use install::RecomputedMlp;
pub use level::CheckpointLevel;
pub use mlp::{GateUpStorage, SwigluConfig, SwigluMlp};

// For its callers, who then depend on this crate alone.
pub use {models, runtime, tch};
