//! How large the experiments are at each scale.

use anyhow::Context;
use clap::{Args, ValueEnum};
use models::Gpt2LikeConfig;
use report::cli::Scale;

use crate::corpus::{Corpus, Limits};

/// Which texts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Data {
    /// The embedded encyclopedia
    #[default]
    Embedded,
    /// WikiText-2's test set to train on and its validation set to measure on, from the folder that FRUGAL_DATA names
    Wikitext2,
}

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
                vocabulary: 1024,
            },
            Scale::Laptop | Scale::Full => Self {
                model: model(64, 4, 256),
                profiled: model(256, 4, 256),
                odd: (255, 5),
                batch_size: 16,
                train_tokens: 56_000,
                validation_tokens: 6_000,
                evaluate_every: 8,
                rounds: 2,
                vocabulary: 4096,
            },
            // The assignment's widths; its own 1023 is 3 · 11 · 31.
            Scale::Paper => Self {
                model: model(1024, 8, 512),
                profiled: model(1024, 8, 512),
                odd: (1023, 11),
                batch_size: 32,
                train_tokens: usize::MAX,
                validation_tokens: 200_000,
                evaluate_every: 50,
                rounds: 3,
                vocabulary: 30_522,
            },
        }
    }

    /// The texts, cut to what these sizes want; `None`, with the reason, where they are not on this machine.
    pub(crate) fn corpus(&self, data: Data) -> anyhow::Result<Result<Corpus, String>> {
        let limits = Limits {
            max_length: self.model.max_length as usize,
            train_tokens: self.train_tokens,
            validation_tokens: self.validation_tokens,
        };
        if data == Data::Embedded {
            return Ok(Ok(Corpus::embedded(&limits).context("reading the embedded corpus")?));
        }
        let Some(folder) = std::env::var_os("FRUGAL_DATA").map(std::path::PathBuf::from) else {
            return Ok(Err(
                "FRUGAL_DATA names no folder with wikitext-2/test.txt and wikitext-2/valid.txt".into()
            ));
        };
        let file = |name: &str| folder.join("wikitext-2").join(name);
        let corpus = Corpus::of_files(
            "wikitext-2",
            &file("test.txt"),
            &file("valid.txt"),
            None,
            self.vocabulary,
            &limits,
        );
        Ok(Ok(corpus.with_context(|| format!("reading WikiText-2 under {}", folder.display()))?))
    }
}

/// Flags that both experiments have.
#[derive(Args)]
pub(crate) struct Which {
    /// How large
    #[arg(long, value_enum, default_value_t)]
    pub(crate) scale: Scale,
    /// Which texts
    #[arg(long, value_enum, default_value_t)]
    pub(crate) data: Data,
}
