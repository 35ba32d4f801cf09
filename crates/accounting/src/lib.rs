//! Predicts parameters, FLOPs, bytes and training time of language models.
//!
//! Nothing here computes with tensors or links libtorch. It is the oracle of other crates' claims about memory and FLOPs, and
//! answers questions before a GPU is rented:
//!
//! ```
//! use accounting::candidates::{Allowed, Batch, Job};
//! use accounting::decoder_flops::Workload;
//! use accounting::offload::{AvailableMemory, Rates, sizes::Choices};
//! use accounting::{fit, presets, quantity};
//!
//! let model = presets::find("qwen2.5-0.5b")?;
//! assert_eq!(model.parameters()?, 494_032_768);
//!
//! // All weights, trained on a GPU with 24 GB.
//! let batch = Batch::new(Workload { batch: 8, sequence: 1024 }, None);
//! let job = Job::new(model, None, Choices::default(), batch, Rates::of_memory(25e9, 50e9, 1e12));
//! let (allowed, budget) = (Allowed::default(), AvailableMemory { device: 24_000_000_000, host: None });
//! let ways = job.search(&allowed, budget)?;
//! let fastest = ways.chosen().expect("a way that fits");
//! println!("{}: {} in the {}", fastest.name(), quantity::bytes_text(fastest.peak.total), fastest.peak.moment);
//!
//! let longest = fit::longest_row(&job, &allowed, budget)?;
//! assert!(longest.largest > 1024);
//! # Ok::<(), accounting::Error>(())
//! ```
//!
//! | question | module |
//! |---|---|
//! | how many bytes does a tensor take? | [`dtype`] |
//! | which tensors does a model have? | [`model`], [`parameters`], [`presets`] |
//! | how many FLOPs? | [`flops`], [`decoder_flops`], [`recompute`] |
//! | how many bytes does a step of this project take, and which way to run it is the fastest that fits a budget? | [`candidates`] |
//! | how many bytes are formats, state, logits and caches? | [`memory`] |
//! | how many bytes is a step by the formulas of the literature? | [`textbook`] |
//! | what is the peak of a SwiGLU stack's training step? | [`swiglu`] |
//! | how many FLOPs and bytes do adapters of a frozen base take? | [`lora`] |
//! | what fits? | [`fit`] |
//! | which layers should recompute their activations? | [`activation_plan`] |
//! | which weights should be offloaded, and how long does a step take then? | [`offload`] |
//! | how many bytes does each rank hold and send? | [`sharding`] |
//! | how long is a step on many GPUs, what bounds it, and what do failures cost? | [`scale`] |
//! | how long does a training take? | [`hardware`], [`training_time`] |
//!
//! Counts are exact integers: bytes and elements `u64`, FLOPs `u128`. A result that does not fit is an [`Error`].

pub mod activation_plan;
pub mod candidates;
pub mod decoder_flops;
pub mod delta_rule;
pub mod dtype;
mod error;
mod exact;
pub mod experts;
pub mod fit;
pub mod flops;
mod gemma4;
pub mod hardware;
pub mod lora;
pub mod memory;
pub mod model;
pub mod offload;
pub mod parameters;
mod passes;
pub mod presets;
pub mod quantity;
pub mod recompute;
pub mod scale;
pub mod sequence_parallel;
pub mod sharding;
pub mod swiglu;
pub mod textbook;
pub mod training_time;

pub use dtype::Dtype;
pub use error::Error;
pub use model::Decoder;
