//! How large the experiments are at each scale.

use clap::Args;
use models::Gpt2LikeConfig;
use report::cli::Scale;

use crate::corpus::{Corpus, DataArgs, Limits};

/// The sizes of a run.
pub(crate) struct Sizes {
    /// What the loading strategies train.
    pub(crate) model: Gpt2LikeConfig,
    /// What is profiled: wide enough that products take most of a step.
    pub(crate) profiled: Gpt2LikeConfig,
    /// The profiled width less one, and heads that divide it.
    pub(crate) odd: (i64, i64),
    pub(crate) batch_size: usize,
    pub(crate) train_tokens: usize,
    pub(crate) validation_tokens: usize,
    pub(crate) evaluate_every: u64,
    /// How often each training is measured.
    pub(crate) rounds: u64,
    /// Turns in which an inefficiency is measured against none.
    pub(crate) turns: u64,
    /// Rounds in which all stages of the whole optimization are measured.
    pub(crate) stage_rounds: u64,
    /// Tokens of a tokenizer that is trained on the spot.
    pub(crate) vocabulary: usize,
}

impl Sizes {
    /// The sizes of the comparison of loading strategies.
    pub(crate) fn of(scale: Scale) -> Self {
        let model = |width: i64, heads, max_length| Gpt2LikeConfig {
            embedding_dim: width,
            hidden_dim: width,
            num_heads: heads,
            ff_dim: 2 * width,
            max_length,
            dropout: 0.0,
            ..Default::default()
        };
        match scale {
            Scale::Smoke => Self {
                model: model(32, 4, 64),
                profiled: model(64, 4, 64),
                odd: (63, 3),
                batch_size: 8,
                train_tokens: 6_000,
                validation_tokens: 1_500,
                evaluate_every: 5,
                rounds: 1,
                turns: 3,
                stage_rounds: 3,
                vocabulary: 1024,
            },
            Scale::Laptop => Self {
                model: model(64, 4, 256),
                profiled: model(256, 4, 256),
                odd: (255, 5),
                batch_size: 16,
                train_tokens: 32_000,
                validation_tokens: 4_000,
                evaluate_every: 8,
                rounds: 1,
                turns: 3,
                stage_rounds: 5,
                vocabulary: 4096,
            },
            Scale::Full => Self {
                model: model(96, 4, 256),
                profiled: model(512, 8, 256),
                odd: (511, 7),
                batch_size: 8,
                train_tokens: 150_000,
                validation_tokens: 20_000,
                evaluate_every: 30,
                rounds: 2,
                turns: 5,
                stage_rounds: 21,
                vocabulary: 4096,
            },
            // The assignment's widths; its own 1023 is 3 · 11 · 31.
            Scale::Paper => Self {
                model: model(1024, 8, 512),
                profiled: model(1024, 8, 512),
                odd: (1023, 11),
                batch_size: 32,
                train_tokens: 10_000_000,
                validation_tokens: 200_000,
                evaluate_every: 50,
                rounds: 3,
                turns: 7,
                stage_rounds: 31,
                vocabulary: 30_522,
            },
        }
    }

    /// The texts, cut to what these sizes want.
    ///
    /// # Errors
    /// Texts that were asked for by name and cannot be had.
    pub(crate) fn corpus(&self, which: &Which) -> anyhow::Result<Corpus> {
        let limits = Limits {
            max_length: self.model.max_length as usize,
            train_tokens: self.train_tokens,
            validation_tokens: self.validation_tokens,
            vocabulary: self.vocabulary,
        };
        Corpus::of(&which.data.data.choose(which.scale)?, &limits)?.map_err(anyhow::Error::msg)
    }
}

/// Flags that these experiments have.
#[derive(Args)]
pub(crate) struct Which {
    /// How large
    #[arg(long, value_enum, default_value_t)]
    pub(crate) scale: Scale,
    #[command(flatten)]
    pub(crate) data: DataArgs,
}
