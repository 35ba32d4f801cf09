//! How large the experiments are at each scale.

use models::Gpt2LikeConfig;
use report::cli::Scale;

use crate::corpus::{Corpus, DataArgs, Limits};

/// The sizes of a run.
pub(crate) struct Sizes {
    /// The model of the loading strategies.
    pub(crate) model: Gpt2LikeConfig,
    /// The profiled model: wide enough that products take most of a step.
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
    pub(crate) fn new(scale: Scale) -> Self {
        let model = |(width, heads, max_length): (i64, i64, i64)| Gpt2LikeConfig {
            embedding_dim: width,
            hidden_dim: width,
            num_heads: heads,
            ff_dim: 2 * width,
            max_length,
            dropout: 0.0,
            ..Default::default()
        };
        // Width, heads and longest row of the two models; the odd width and its heads; samples; tokens to train on and to validate
        // on; steps between validations; rounds, turns and rounds of stages; vocabulary. The assignment's widths at `paper`; its own
        // 1023 is 3 · 11 · 31.
        #[rustfmt::skip]
        let (small, profiled, odd, batch_size, tokens, evaluate_every, repeats, vocabulary) = match scale {
            Scale::Smoke  => ((32, 4, 64),    (64, 4, 64),    (63, 3),     8,  (6_000, 1_500),        5,  [1, 1, 1],  1024),
            Scale::Laptop => ((64, 4, 256),   (256, 4, 256),  (255, 5),    16, (32_000, 4_000),       8,  [1, 3, 5],  4096),
            Scale::Full   => ((96, 4, 256),   (512, 8, 256),  (511, 7),    8,  (150_000, 20_000),     30, [2, 5, 21], 4096),
            Scale::Paper  => ((1024, 8, 512), (1024, 8, 512), (1023, 11),  32, (10_000_000, 200_000), 50, [3, 7, 31], 30_522),
        };
        let [rounds, turns, stage_rounds] = repeats;
        let (train_tokens, validation_tokens) = tokens;
        Self {
            model: model(small),
            profiled: model(profiled),
            odd,
            batch_size,
            train_tokens,
            validation_tokens,
            evaluate_every,
            rounds,
            turns,
            stage_rounds,
            vocabulary,
        }
    }

    /// The texts, cut to what these sizes want.
    ///
    /// # Errors
    /// Texts that were asked for by name and cannot be had.
    pub(crate) fn corpus(&self, data: &DataArgs, scale: Scale) -> anyhow::Result<Corpus> {
        let limits = Limits {
            max_length: self.model.max_length as usize,
            train_tokens: self.train_tokens,
            validation_tokens: self.validation_tokens,
            vocabulary: self.vocabulary,
        };
        Corpus::open(&data.data.choose(scale)?, &limits)?.map_err(anyhow::Error::msg)
    }
}
