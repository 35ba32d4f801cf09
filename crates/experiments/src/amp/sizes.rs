//! How large the experiments are at each scale.

use models::Gpt2LikeConfig;
use report::cli::Scale;
use tch::Device;
use training::strategy::Strategy;

use super::gradient_time;
use super::setup::Scales;
use super::training::Training;
use crate::corpus::{Corpus, Data, Limits};

/// The sizes of a run.
pub(crate) struct Sizes {
    pub(crate) training: Training,
    pub(crate) limits: Limits,
    /// Trainings in each set-up, each from another seed.
    pub(crate) rounds: u64,
    /// Steps of the trainings that compare scales.
    pub(crate) sweep_steps: u64,
}

impl Sizes {
    pub(crate) fn new(scale: Scale, device: Device, seed: u64) -> Self {
        let model = |width: i64, heads, max_length| Gpt2LikeConfig {
            embedding_dim: width,
            hidden_dim: width,
            num_heads: heads,
            ff_dim: 2 * width,
            max_length,
            dropout: 0.0,
            ..Default::default()
        };
        let training = |model, batch_size, steps, lr| Training {
            model,
            strategy: Strategy::Packed,
            batch_size,
            steps,
            lr,
            warmup: 10,
            evaluate_every: (steps / 10).max(5),
            scales: Scales::fitting(steps),
            device,
            seed,
        };
        let limits = |train_tokens, validation_tokens, max_length, vocabulary| Limits {
            max_length,
            train_tokens,
            validation_tokens,
            vocabulary,
        };
        match scale {
            Scale::Smoke => Self {
                training: training(model(32, 4, 64), 8, 6, 3e-3),
                limits: limits(6_000, 1_500, 64, 1024),
                rounds: 1,
                sweep_steps: 3,
            },
            Scale::Laptop => Self {
                training: training(model(64, 4, 128), 12, 75, 3e-3),
                limits: limits(110_000, 5_000, 128, 2048),
                rounds: 1,
                sweep_steps: 35,
            },
            Scale::Full => Self {
                training: training(model(64, 4, 128), 12, 250, 3e-3),
                limits: limits(400_000, 20_000, 128, 2048),
                rounds: 3,
                sweep_steps: 120,
            },
            Scale::Paper => Self {
                training: training(model(1024, 8, 512), 32, 4_000, 3e-4),
                limits: limits(5_000_000, 200_000, 512, 30_522),
                rounds: 3,
                sweep_steps: 400,
            },
        }
    }

    /// The texts, cut to what these sizes want.
    ///
    /// # Errors
    /// Texts that were asked for by name and cannot be had.
    pub(crate) fn corpus(&self, data: &Data, scale: Scale) -> anyhow::Result<Corpus> {
        Corpus::open(&data.choose(scale)?, &self.limits)?.map_err(anyhow::Error::msg)
    }
}

/// The sizes of one gradient: wide enough that products take most of it.
pub(crate) fn wide(scale: Scale, device: Device, seed: u64) -> gradient_time::Sizes {
    let (width, rows, max_length, vocab_size) = match scale {
        Scale::Smoke => (64, 2, 64, 512),
        Scale::Laptop => (256, 8, 256, 4096),
        Scale::Full => (512, 8, 256, 4096),
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
