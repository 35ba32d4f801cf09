//! Mixed-precision training: autocast to fp16, bf16 or fp8, and static and dynamic loss scaling.
//!
//! Weights w stay in fp32. [`Autocast`] computes matrix products on rounded operands, y = round(x)·round(w)ᵀ with fp32 sums,
//! and everything else (normalisations, softmax, losses) in fp32. fp16 has no number between 0 and 2⁻²⁴, so small gradients
//! underflow to 0, and none above 65504, so large ones overflow to infinity: a loss scaler runs backward from s·L, divides the
//! gradients by s in fp32, and skips the step if one of them is not finite ([`scaler`]). bf16 has the range of fp32 and needs no
//! scaler.
//!
//! ```
//! use amp::{Autocast, DynamicGradScaler, DynamicScalerConfig};
//! use amp::models::module::trainable;
//! use amp::models::{Gpt2Like, Gpt2LikeConfig};
//! use amp::tch::{Device, Kind};
//! use amp::training::batches::Synthetic;
//! use amp::training::optimizer::{AdamW, Group, DeviceOptimizer};
//! use amp::training::trainer::{TrainerConfig, Trainer};
//!
//! let config = Gpt2LikeConfig { vocab_size: 32, hidden_dim: 32, embedding_dim: 32, num_heads: 4, ff_dim: 64, ..Default::default() };
//! let model = Gpt2Like::new(&config, (Kind::Float, Device::Cpu))?;
//! let optimizer = DeviceOptimizer::new(AdamW::default(), vec![Group::new(trainable(&model), 1e-3)])?;
//! let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), TrainerConfig { steps: 3, ..TrainerConfig::default() })?;
//! trainer.precision = Some(Autocast::new(Kind::Half)?.policy());
//! trainer.scaler = Box::new(DynamicGradScaler::new(DynamicScalerConfig::default())?);
//!
//! let mut data = Synthetic {
//!     seed: 1, vocabulary: 32, rows: 2, length: 16, noise: 1, batches: None, device: Device::Cpu, position: 0,
//! };
//! trainer.run(&mut data, None)?;
//! assert_eq!(trainer.step(), 3);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `examples/mixed_precision.rs` is a training loop without `Trainer`, on plain tensors.
//!
//! | module | subject |
//! |---|---|
//! | [`scaler`] | static and dynamic loss scaling, for any number of optimizers, on the host or on the device |
//! | [`autocast`] | the dtype of each computation, and the cast cache |
//!
//! # Compared with PyTorch
//!
//! | | `torch.amp` | here |
//! |---|---|---|
//! | what is cast | every operator, in the dispatcher | the products that the model computes through [`runtime::precision`] |
//! | cast cache | trainable leaves | all leaves, frozen weights included; never stale |
//! | fp16 on a CPU without fp16 products | fp16 products at under 1 % of the fp32 rate | fp32 products of rounded operands |
//! | update of the dynamic scale | growth and backoff | the same, to the bit; also bounds, hysteresis, and an end after too many skipped steps |
//! | host synchronisations per step | one per optimizer, unless it is fused | one, or none with a [`DeviceScaler`] |
//!
//! The cast cache holds 2 bytes per parameter during a scope. Unscaling, the overflow check and the norm are one pass over the
//! gradients.
//!
//! # Errors
//!
//! An option outside its range, a call out of order (unscale, step, update), fp16 gradients, the state of another scaler, and
//! a run in which every step overflows are errors that name the remedy ([`enum@Error`]).

pub mod autocast;
mod error;
pub mod scaler;

pub use autocast::Autocast;
pub use autocast::cast_cache::CastStatistics;
pub use error::{Error, Result};
pub use scaler::device_scaler::{DeviceRule, DeviceScaler};
pub use scaler::dynamic_scale::{DynamicRule, DynamicScale, DynamicScalerConfig};
pub use scaler::static_scale::StaticRule;
pub use scaler::{DynamicGradScaler, ScaleRule, Scaler, StaticGradScaler};

// For its callers, who then depend on this crate alone.
pub use {models, runtime, tch, training};
