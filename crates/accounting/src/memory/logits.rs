//! The logits and the temporaries of the cross-entropy: the largest tensors of a small model with a large vocabulary.
//!
//! Per token and vocabulary entry, composed of framework operations (`c` bytes in matrix products):
//!
//! ```text
//! logits                                 c    held by the caller until the step ends
//! a copy in fp32                         4    only if c < 4; freed after the loss
//! log-probabilities                      4    kept for the backward
//! gradient of the log-probabilities      4    backward only
//! gradient of the logits                 4    backward only
//! ```
//!
//! The peak is in the backward, `c + 12`: 16 bytes in fp32, 14 in 16 bits. A loss that processes the tokens in chunks has
//! logits for one chunk only. It keeps the gradient of the hidden states instead, and has the gradient of the output matrix
//! (`v·d`) while it runs, which an eager loss has only when its logits are freed:
//!
//! | [`Loss`] | bytes per token and entry of a chunk | of `v·d`, in addition to the gradient |
//! |---|---|---|
//! | `ChunkedRecompute` | `c + 12` | one chunk's gradient, before it is added |
//! | `GradInForward` | `c`, and `4` for a copy in fp32 unless `c = 4`; the gradient is written over it | – |
//! | `LinearCrossEntropy` | `4`: one tile in fp32, its gradient written over it | an accumulator in fp32, unless the gradient is that, or one chunk's in bf16 |

use std::str::FromStr;

use crate::decoder_flops::Workload;
use crate::exact::positive;
use crate::memory::Item;
use crate::memory::recipe::Recipe;
use crate::model::Decoder;
use crate::{Dtype, Error};

/// The implementation of the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Loss {
    /// All logits, then the cross-entropy, composed of framework operations.
    #[default]
    Eager,
    /// Output projection and loss for a chunk of tokens at a time, composed of framework operations; the backward recomputes
    /// each chunk.
    ChunkedRecompute {
        /// Tokens of a chunk.
        tokens: u64,
    },
    /// The same with the gradients computed in the forward, in the dtype of the products, as Malek's and Liger's.
    GradInForward {
        /// Tokens of a chunk.
        tokens: u64,
    },
    /// The same with one tile of logits in fp32 that is overwritten by its gradient, and the output matrix' gradient
    /// accumulated in fp32.
    LinearCrossEntropy {
        /// Tokens of a tile.
        tokens: u64,
        /// Tokens of the largest step that has one tile for all labelled tokens, and a gradient in bf16 that is rounded at once instead of
        /// accumulated; 0 for none.
        whole: u64,
    },
}

impl Loss {
    /// The names that [`Loss::from_name`] reads, from the simplest on.
    pub const NAMES: [&str; 4] = ["naive", "chunked-recompute", "grad-in-forward", "linear-cross-entropy"];

    /// Returns the loss of a name, with chunks of `tokens` if it has chunks.
    pub fn from_name(name: &str, tokens: u64) -> Result<Self, Error> {
        let known = Self::NAMES.into_iter().position(|known| known.eq_ignore_ascii_case(name));
        match known {
            Some(0) => Ok(Self::Eager),
            Some(1) => Ok(Self::ChunkedRecompute { tokens }),
            Some(2) => Ok(Self::GradInForward { tokens }),
            Some(_) => Ok(Self::LinearCrossEntropy { tokens, whole: 0 }),
            None => Err(Error::unknown("loss", name, Self::NAMES)),
        }
    }

    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Eager => "naive",
            Self::ChunkedRecompute { .. } => "chunked-recompute",
            Self::GradInForward { .. } => "grad-in-forward",
            Self::LinearCrossEntropy { .. } => "linear-cross-entropy",
        }
    }

    /// Returns the tokens of a chunk, if there are chunks.
    pub const fn chunk(self) -> Option<u64> {
        match self {
            Self::Eager => None,
            Self::ChunkedRecompute { tokens }
            | Self::GradInForward { tokens }
            | Self::LinearCrossEntropy { tokens, .. } => Some(tokens),
        }
    }

    /// Returns whether a step of `tokens` has one tile whose gradient of the output matrix is rounded at once.
    pub(crate) const fn is_whole(self, tokens: u64) -> bool {
        matches!(self, Self::LinearCrossEntropy { whole, .. } if tokens <= whole)
    }

    /// Returns the tokens of a chunk of a step of `tokens`, if there are chunks.
    pub(crate) const fn chunk_of(self, tokens: u64) -> Option<u64> {
        if self.is_whole(tokens) { Some(tokens) } else { self.chunk() }
    }
}

impl FromStr for Loss {
    type Err = Error;

    /// As [`Loss::from_name`], with chunks of 1024 tokens.
    fn from_str(text: &str) -> Result<Self, Error> {
        Self::from_name(text, 1024)
    }
}

/// Lists logits, temporaries of the loss and their gradients at their peak: at the start of backward, or while chunks are
/// processed. The gradient of the output matrix is counted with the other gradients. Chunks have the `labelled` tokens only, or all; an
/// eager loss always computes all.
pub fn peak(
    model: &Decoder,
    work: Workload,
    recipe: &Recipe,
    loss: Loss,
    labelled: Option<u64>,
) -> Result<Vec<Item>, Error> {
    let (tokens, c) = (work.tokens()?, recipe.compute.storage_bits() / 8);
    let labelled = labelled.map_or(tokens, |labelled| labelled.min(tokens));
    let rows = match loss.chunk_of(tokens) {
        None => tokens,
        Some(chunk) => positive("tokens of a chunk of logits", chunk)?.min(labelled),
    };
    let size = [rows, model.vocabulary];
    let matrix = [model.vocabulary, model.hidden];
    let composed = || {
        Ok::<_, Error>(vec![
            Item::new("logits", c, &size)?,
            Item::new("log-probabilities", 4, &size)?,
            Item::new("gradient of the log-probabilities", 4, &size)?,
            Item::new("gradient of the logits", 4, &size)?,
        ])
    };
    let mut items = match loss {
        Loss::Eager => return composed(),
        Loss::ChunkedRecompute { .. } => {
            let mut items = composed()?;
            let bytes = recipe.gradients.storage_bits() / 8;
            items.push(Item::new("a chunk's gradient of the output matrix", bytes, &matrix)?);
            items
        }
        Loss::GradInForward { .. } => {
            let mut items = vec![Item::new("logits", c, &size)?];
            if c < 4 {
                items.push(Item::new("logits in fp32", 4, &size)?);
            }
            items
        }
        Loss::LinearCrossEntropy { .. } => {
            let mut items = vec![Item::new("tile of logits in fp32", 4, &size)?];
            if recipe.gradients.storage_bits() < Dtype::Fp32.storage_bits() && !loss.is_whole(tokens) {
                items.push(Item::new("accumulator of the output matrix' gradient", 4, &matrix)?);
            }
            items
        }
    };
    items.push(Item::new("gradient of the hidden states", c, &[tokens, model.hidden])?);
    Ok(items)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::total;
    use crate::presets;

    #[test]
    fn bytes_per_token_and_entry() {
        let model = presets::find("gpt2").unwrap();
        let work = Workload { batch: 2, sequence: 512 };
        let bytes = |recipe, loss| total(&peak(&model, work, &recipe, loss, None).unwrap()).unwrap();
        let (v, d) = (50257, 768);
        assert_eq!(bytes(Recipe::FP32, Loss::Eager), 16 * 1024 * v);
        assert_eq!(bytes(Recipe::BF16, Loss::Eager), 14 * 1024 * v);
        let cases = [
            // Per entry of a chunk, per entry of the output matrix, per entry of the hidden states.
            (Recipe::FP32, "chunked-recompute", [16, 4, 4]),
            (Recipe::BF16, "chunked-recompute", [14, 2, 2]),
            (Recipe::FP32, "grad-in-forward", [4, 0, 4]),
            (Recipe::BF16, "grad-in-forward", [6, 0, 2]),
            (Recipe::FP32, "linear-cross-entropy", [4, 0, 4]),
            (Recipe::BF16, "linear-cross-entropy", [4, 4, 2]),
            // Products in bf16, but the weight and its gradient are in fp32.
            (Recipe::AMP_BF16, "linear-cross-entropy", [4, 0, 2]),
        ];
        for (recipe, name, [logit, matrix, hidden]) in cases {
            for tokens in [256, 1 << 40] {
                let loss = Loss::from_name(name, tokens).unwrap();
                let chunk = tokens.min(1024);
                let hand = logit * chunk * v + matrix * v * d + hidden * 1024 * d;
                assert_eq!(bytes(recipe, loss), hand, "{name} {} {tokens}", recipe.name);
                assert_eq!((loss.name(), loss.chunk()), (name, Some(tokens)));
            }
            let none = Loss::from_name(name, 0).unwrap();
            assert!(peak(&model, work, &recipe, none, None).is_err());
        }
    }

    /// A step of up to `whole` tokens is one tile of its labelled tokens, without an accumulator.
    #[test]
    fn one_tile_needs_no_accumulator() {
        let model = presets::find("gpt2").unwrap();
        let work = Workload { batch: 2, sequence: 512 };
        let (v, d) = (50257, 768);
        for (whole, labelled, hand) in [
            (1024, None, 4 * 1024 * v + 2 * 1024 * d),
            (1024, Some(700), 4 * 700 * v + 2 * 1024 * d),
            (1023, None, 4 * 256 * v + 4 * v * d + 2 * 1024 * d),
            (0, Some(700), 4 * 256 * v + 4 * v * d + 2 * 1024 * d),
        ] {
            let loss = Loss::LinearCrossEntropy { tokens: 256, whole };
            let items = peak(&model, work, &Recipe::BF16, loss, labelled).unwrap();
            assert_eq!(total(&items).unwrap(), hand, "{whole} {labelled:?}");
        }
    }

    #[test]
    fn names_round_trip() {
        for name in Loss::NAMES {
            assert_eq!(name.parse::<Loss>().unwrap().name(), name);
        }
        let words = "liger".parse::<Loss>().unwrap_err().to_string();
        assert!(words.starts_with("unknown loss `liger`; known are: naive, chunked-recompute,"), "{words}");
    }
}
