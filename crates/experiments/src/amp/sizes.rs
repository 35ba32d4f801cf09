//! How large the experiments are at each scale.

use amp::DynamicOptions;
use anyhow::Context;
use models::Gpt2LikeConfig;
use report::cli::Scale;
use tch::Device;
use training::strategy::Strategy;

use super::gradient_time;
use super::setup::Scales;
use super::training::Training;
use crate::corpus::{Corpus, Limits};

/// The sizes of a run.
pub(crate) struct Sizes {
    pub(crate) training: Training,
    pub(crate) train_tokens: usize,
    pub(crate) validation_tokens: usize,
    /// Trainings in each set-up, each from another seed.
    pub(crate) rounds: u64,
}

impl Sizes {
    pub(crate) fn of(scale: Scale, device: Device, seed: u64) -> Self {
        let model = |width: i64, heads, max_length| Gpt2LikeConfig {
            embedding_dim: width,
            hidden_dim: width,
            num_heads: heads,
            ff_dim: 2 * width,
            max_length,
            dropout: 0.0,
            ..Default::default()
        };
        let scales = Scales {
            fixed: 65_536.0,
            dynamic: DynamicOptions::default(),
            restless: DynamicOptions { init_scale: 2f32.powi(24), growth_interval: 30, ..Default::default() },
        };
        let training = |model, batch_size, epochs, lr, evaluate_every| Training {
            model,
            strategy: Strategy::Packed,
            batch_size,
            epochs,
            lr,
            warmup: 10,
            evaluate_every,
            scales,
            device,
            seed,
        };
        match scale {
            Scale::Smoke => Self {
                training: training(model(32, 4, 64), 8, 1, 1e-3, 10),
                train_tokens: 6_000,
                validation_tokens: 1_500,
                rounds: 1,
            },
            Scale::Laptop | Scale::Full => Self {
                training: training(model(64, 4, 256), 16, 2, 1e-3, 12),
                train_tokens: 50_000,
                validation_tokens: 6_000,
                rounds: 1,
            },
            Scale::Paper => Self {
                training: training(model(1024, 8, 512), 32, 3, 1e-4, 50),
                train_tokens: usize::MAX,
                validation_tokens: 200_000,
                rounds: 2,
            },
        }
    }

    pub(crate) fn corpus(&self) -> anyhow::Result<Corpus> {
        let limits = Limits {
            max_length: self.training.model.max_length as usize,
            train_tokens: self.train_tokens,
            validation_tokens: self.validation_tokens,
        };
        Corpus::embedded(&limits).context("reading the embedded corpus")
    }
}

/// The sizes of one gradient: wide enough that products take most of it.
pub(crate) fn wide(scale: Scale, device: Device, seed: u64) -> gradient_time::Sizes {
    let (width, rows, max_length, vocab_size) = match scale {
        Scale::Smoke => (64, 2, 64, 512),
        Scale::Laptop | Scale::Full => (512, 8, 256, 4096),
        Scale::Paper => (1024, 32, 512, 30_522),
    };
    let model = Gpt2LikeConfig {
        vocab_size,
        embedding_dim: width,
        hidden_dim: width,
        num_heads: 8,
        ff_dim: 4 * width,
        max_length,
        dropout: 0.0,
        ..Default::default()
    };
    gradient_time::Sizes { model, rows, device, seed }
}
