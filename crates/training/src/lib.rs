//! Optimizers, schedules, losses, the training loop, crash-safe checkpoints.
//!
//! The parts can be used alone: [`optimizer`], [`schedule`], [`clip`], [`accumulation`], [`loss`], [`evaluation`],
//! [`checkpoint`], [`divergence`]. [`trainer`] is the loop over them. It trains any `models::module::LanguageModel` on any
//! [`Batches`], with any loss scaler ([`GradScaler`](scaler::GradScaler)), and reports to [`Observer`](observer::Observer)s.
//!
//! [`preference`] has losses of pairs of completions. [`activations`] controls activation checkpointing. [`masked_rows`] makes fine-tuning
//! batches, [`strategy`] selects the batching strategy. The crate [`trace`] analyses where the time of a step goes, [`step_tracing`]
//! records steps for it, [`probe`] analyses a single pass.
//!
//! ```
//! use models::{Gpt2Like, Gpt2LikeConfig, module};
//! use tch::{Device, Kind};
//! use training::batches::Synthetic;
//! use training::optimizer::{AdamW, DeviceOptimizer, Group};
//! use training::trainer::{StopReason, TrainerConfig, Trainer};
//!
//! runtime::random::seed(1)?;
//! let config = Gpt2LikeConfig {
//!     vocab_size: 32, embedding_dim: 16, hidden_dim: 16, num_heads: 2, ff_dim: 32, max_length: 16,
//!     ..Gpt2LikeConfig::default()
//! };
//! let model = Gpt2Like::new(&config, (Kind::Float, Device::Cpu))?;
//! let optimizer = DeviceOptimizer::new(AdamW::default(), Group::by_dimension(module::trainable(&model), 3e-3, 0.1))?;
//! let options = TrainerConfig { steps: 20, clip: Some(1.0), ..TrainerConfig::default() };
//! let mut data = Synthetic {
//!     seed: 1, vocabulary: 32, rows: 8, length: 16, noise: 1, batches: None, device: Device::Cpu, position: 0,
//! };
//! let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options)?;
//! assert_eq!(trainer.run(&mut data, None)?, StopReason::Completed);
//! # Ok::<(), training::Error>(())
//! ```

pub mod accumulation;
pub mod activations;
pub mod batches;
pub mod checkpoint;
pub mod clip;
pub mod distillation;
pub mod divergence;
pub mod embedding_noise;
pub mod error;
pub mod evaluation;
pub mod interrupt;
pub mod layer_source;
pub mod loader_batches;
pub mod loss;
pub mod masked_rows;
pub mod observer;
pub mod optimizer;
pub mod policy;
pub mod preference;
pub mod probe;
pub mod ranks;
pub mod scaler;
pub mod schedule;
mod split_mix;
pub mod step_tracing;
pub mod strategy;
pub mod trainer;

pub use batches::Batches;
pub use error::{Error, Result};
pub use loader_batches::LoaderBatches;
pub use optimizer::{DeviceOptimizer, Optimizer};
pub use ranks::Ranks;
pub use schedule::LrSchedule;
pub use trainer::{Trainer, TrainerConfig};
