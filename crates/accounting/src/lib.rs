//! Parameters, FLOPs, bytes and training time of language models, on paper.
//!
//! Nothing here computes with tensors; nothing links libtorch. It is the oracle that other crates' claims about
//! memory and FLOPs are tested against, and it answers questions before a GPU is rented:
//!
//! ```
//! use accounting::estimate::{Plan, estimate};
//! use accounting::decoder_flops::Workload;
//! use accounting::{fit, presets, quantity};
//!
//! let model = presets::find("qwen2.5-0.5b")?;
//! assert_eq!(model.parameters()?, 494_032_768);
//!
//! let plan = Plan { work: Workload { batch: 8, sequence: 1024 }, ..Plan::default() };
//! println!("peak: {}", quantity::bytes_text(estimate(&model, &plan)?.peak().total));
//!
//! let batch = fit::largest_batch(&model, &plan, 24_000_000_000)?;
//! println!("largest batch on 24 GB: {}", batch.largest);
//! # Ok::<(), accounting::Error>(())
//! ```
//!
//! | question | module |
//! |---|---|
//! | what can a number format hold, what does a tensor take? | [`dtype`], [`float_format`] |
//! | which tensors does a model have? | [`model`], [`parameters`], [`presets`], [`config`] |
//! | how many FLOPs? | [`flops`], [`decoder_flops`], [`recompute`] |
//! | how many bytes, where? | [`memory`], [`estimate`] |
//! | what is the peak of a SwiGLU stack's training step? | [`swiglu`] |
//! | what does it take to train adapters beside a frozen base? | [`lora`] |
//! | what fits? | [`fit`] |
//! | which layers should compute their activations again? | [`activation_plan`] |
//! | which weights to keep off the device, and how long is a step then? | [`offload`] |
//! | how long does it train? | [`hardware`], [`training_time`] |
//! | what did the lecture say? | [`lecture`] |
//!
//! Counts are exact integers: bytes and elements `u64`, FLOPs `u128`. A result that does not fit is an [`Error`].

pub mod activation_plan;
pub mod bar;
pub mod config;
pub mod decoder_flops;
pub mod dtype;
mod error;
pub mod estimate;
mod exact;
pub mod fit;
pub mod float_format;
pub mod flops;
pub mod hardware;
pub mod lecture;
pub mod lora;
pub mod memory;
pub mod model;
pub mod offload;
pub mod parameters;
mod passes;
pub mod presets;
pub mod quantity;
pub mod recompute;
pub mod swiglu;
pub mod training_time;

pub use dtype::Dtype;
pub use error::Error;
pub use model::Decoder;
