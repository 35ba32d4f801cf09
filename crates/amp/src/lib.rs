//! Mixed precision by hand: loss scalers and autocast.
//!
//! Weights stay in fp32. [`Autocast`] rounds the operands of a model's products to fp16 or bf16 and leaves normalisations,
//! softmax and losses in fp32; a loss scaler keeps the small gradients of fp16 from becoming zero. bf16 has fp32's range and
//! needs none.
//!
//! ```
//! use amp::{Autocast, DynamicGradScaler, DynamicOptions};
//! use models::module::trainable;
//! use models::{Gpt2Like, Gpt2LikeConfig};
//! use tch::{Device, Kind};
//! use training::batches::Synthetic;
//! use training::optimizer::{AdamW, Group, Optimizer};
//! use training::trainer::{Options, Trainer};
//!
//! let config = Gpt2LikeConfig { vocab_size: 32, hidden_dim: 32, embedding_dim: 32, num_heads: 4, ff_dim: 64, ..Default::default() };
//! let model = Gpt2Like::new(&config, (Kind::Float, Device::Cpu))?;
//! let optimizer = Optimizer::new(AdamW::default(), vec![Group::new(trainable(&model), 1e-3)])?;
//! let mut trainer = Trainer::new(Box::new(model), optimizer, Options { steps: 3, ..Options::default() })?;
//! trainer.precision = Some(Autocast::new(Kind::Half)?.policy());
//! trainer.scaler = Box::new(DynamicGradScaler::new(DynamicOptions::default())?);
//!
//! let mut data = Synthetic {
//!     seed: 1, vocabulary: 32, rows: 2, length: 16, noise: 1, batches: None, device: Device::Cpu, position: 0,
//! };
//! trainer.run(&mut data, None)?;
//! assert_eq!(trainer.step(), 3);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | module | subject |
//! |---|---|
//! | [`scaler`] | static and dynamic loss scaling, for any number of optimizers |
//! | [`autocast`] | what is computed in which dtype, and the cache of casts |

pub mod autocast;
mod error;
pub mod scaler;

pub use autocast::Autocast;
pub use autocast::cast_cache::CastStatistics;
pub use error::{Error, Result};
pub use scaler::device_scaler::{DeviceRule, DeviceScaler};
pub use scaler::dynamic_scale::{DynamicOptions, DynamicRule, DynamicScale};
pub use scaler::static_scale::StaticRule;
pub use scaler::{DynamicGradScaler, ScaleRule, Scaler, StaticGradScaler};
