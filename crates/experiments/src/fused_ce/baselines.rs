//! Cross-entropy of a linear layer by six implementations, from the usual one of frameworks to `fused-ce`.
//!
//! | implementation | logits in memory | matrix products | gradient of W summed in | tokens without a label |
//! |---|---|---|---|---|
//! | [`Naive`](Implementation::Naive) | all, and three more tensors of their shape | 3 | one product | computed |
//! | [`ChunkedRecompute`](Implementation::ChunkedRecompute) | one chunk's | 4 | W's dtype | computed |
//! | [`GradInForward`](Implementation::GradInForward) | one chunk's | 3 | W's dtype | computed |
//! | [`LinearCrossEntropy`](Implementation::LinearCrossEntropy) | one chunk's, once | 3 | fp32 | dropped |
//! | [`RoundedGradient`](Implementation::RoundedGradient) | the same | 3 | fp32 | dropped |
//! | [`RoundedLogits`](Implementation::RoundedLogits) | the same, in the operands' dtype | 3 | fp32 | dropped |
//!
//! [`GradInForward`](Implementation::GradInForward) is the algorithm of Malek's `efficient_cross_entropy` and of Liger. The assignment uses
//! it with chunks of an eighth of the tokens, and at most 4096.

mod chunked_recompute;
mod grad_in_forward;
mod head;
mod naive;

use std::fmt;
use std::str::FromStr;

use fused_ce::{Chunk, Error, Inputs, LinearCrossEntropy, Reduction, Result};
use tch::{Kind, Tensor};

pub use head::install;

/// The target of a token that does not count in the loss.
const IGNORE_INDEX: i64 = models::module::IGNORE_INDEX;

/// A way to compute the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Implementation {
    /// All logits, then the cross-entropy, by libtorch's operators and graph. Logits in low precision are cast to fp32.
    Naive,
    /// The same, one chunk of tokens at a time; backward recomputes each chunk.
    ChunkedRecompute,
    /// Chunk by chunk, with the gradients computed in forward, in the operands' dtypes.
    GradInForward,
    /// The loss of `fused-ce`.
    LinearCrossEntropy,
    /// The same with `round_logits_gradient`, as `frugal` uses it: the gradient of the logits is rounded to the operands' dtype, as in the
    /// baselines.
    RoundedGradient,
    /// The same with `round_logits`: on a GPU the logits are stored in the operands' dtype too. On a CPU it equals
    /// [`RoundedGradient`](Implementation::RoundedGradient).
    RoundedLogits,
}

impl Implementation {
    /// All implementations, in the order of the table.
    pub const ALL: [Self; 6] = [
        Self::Naive,
        Self::ChunkedRecompute,
        Self::GradInForward,
        Self::LinearCrossEntropy,
        Self::RoundedGradient,
        Self::RoundedLogits,
    ];

    /// Returns its name, which [`FromStr`] parses.
    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::ChunkedRecompute => "chunked-recompute",
            Self::GradInForward => "grad-in-forward",
            Self::LinearCrossEntropy => "linear-cross-entropy",
            Self::RoundedGradient => "linear-cross-entropy-rounded",
            Self::RoundedLogits => "linear-cross-entropy-rounded-logits",
        }
    }

    /// Returns the options of an implementation by `fused-ce`; `None` for a baseline.
    pub(crate) fn options(self) -> Option<LinearCrossEntropy> {
        let [round_logits_gradient, round_logits] = match self {
            Self::LinearCrossEntropy => [false; 2],
            Self::RoundedGradient => [true, false],
            Self::RoundedLogits => [true; 2],
            Self::Naive | Self::ChunkedRecompute | Self::GradInForward => return None,
        };
        Some(LinearCrossEntropy { round_logits_gradient, round_logits, ..LinearCrossEntropy::default() })
    }

    /// Computes the mean or the sum of the loss of hidden states `x` `[…, h]`, a weight `w` `[v, h]` and class indices `targets` (−100:
    /// ignored). Without `chunk`, the chunked baselines use the assignment's. `labelled` is the number of targets that are not ignored, if the
    /// host knows it.
    ///
    /// # Errors
    /// Same as [`LinearCrossEntropy::run`].
    pub fn loss(
        self,
        [x, w, targets]: [&Tensor; 3],
        labelled: Option<i64>,
        reduction: Reduction,
        chunk: Option<Chunk>,
    ) -> Result<Tensor> {
        if let Some(options) = self.options() {
            let options = LinearCrossEntropy { reduction, chunk, ..options };
            let inputs = Inputs { labelled_tokens: labelled, ..Inputs::new(x, w, targets) };
            return Ok(options.run(&inputs)?.loss);
        }
        let mean = match reduction {
            Reduction::Mean => true,
            Reduction::Sum => false,
            Reduction::None => return Err(refused(format!("`{self}` computes means and sums"))),
        };
        let vocabulary = w.size()[0];
        let tokens = targets.numel() as i64;
        let chunk = || chunk_tokens(chunk, tokens, vocabulary, tile_kind(x.kind()).elt_size_in_bytes());
        match self {
            Self::Naive => naive::loss(x, w, targets, mean),
            Self::ChunkedRecompute => chunked_recompute::loss(x, w, targets, mean, chunk()?),
            _ => grad_in_forward::loss(x, w, targets, mean, chunk()?),
        }
    }
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Implementation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|implementation| implementation.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            refused(format!("unknown implementation `{text}`; expected one of {names}"))
        })
    }
}

fn refused(reason: String) -> Error {
    Error::invalid("linear cross-entropy", reason)
}

/// Returns the dtype of logits: fp32, or f64 for f64.
fn tile_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// Returns the tokens of a chunk: those of `chunk`, else an eighth of all and at most 4096.
pub(super) fn chunk_tokens(
    chunk: Option<Chunk>,
    tokens: i64,
    vocabulary: i64,
    element: usize,
) -> Result<i64> {
    let row = vocabulary.unsigned_abs() * element as u64;
    Ok(match chunk {
        Some(Chunk::Tokens(tokens)) => tokens,
        Some(Chunk::Budget(budget)) if budget < row => {
            return Err(refused(format!(
                "a budget of {budget} bytes is less than the {row} bytes of one row of {vocabulary} logits; increase it, or set a number of \
                 tokens"
            )));
        }
        Some(Chunk::Budget(budget)) => i64::try_from(budget / row).unwrap_or(i64::MAX),
        None => (tokens / 8).clamp(1, 4096),
    })
}
