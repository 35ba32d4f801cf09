//! One loss of classes by several implementations, from the usual one of frameworks to `fused-ce`.
//!
//! | implementation | logits at a time | products | gradient of W summed in | rows without a label |
//! |---|---|---|---|---|
//! | [`Naive`](Implementation::Naive) | all, and as much again three times over | 3 | one product | computed |
//! | [`ChunkedRecompute`](Implementation::ChunkedRecompute) | one chunk's | 4 | W's dtype | computed |
//! | [`GradInForward`](Implementation::GradInForward) | one chunk's | 3 | W's dtype | computed |
//! | [`LinearCrossEntropy`](Implementation::LinearCrossEntropy) | one chunk's, once | 3 | fp32 | dropped |
//! | [`RoundedGradient`](Implementation::RoundedGradient) | the same | 3 | fp32 | dropped |
//! | [`RoundedLogits`](Implementation::RoundedLogits) | the same, in the operands' dtype | 3 | fp32 | dropped |
//!
//! The third is the way of Malek's `efficient_cross_entropy`, which the assignment takes up with chunks of an eighth of the
//! tokens and at most 4096, and of Liger.

mod chunked_recompute;
mod grad_in_forward;
mod head;
mod naive;

use std::fmt;
use std::str::FromStr;

use fused_ce::{Chunk, Error, Inputs, LinearCrossEntropy, Reduction, Result};
use tch::{Kind, Tensor};

pub use head::install;

/// The target that means none.
const IGNORE_INDEX: i64 = models::module::IGNORE_INDEX;

/// A way to compute the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Implementation {
    /// All logits, then the cross-entropy, by libtorch's operators and graph; low precision is taken to fp32 in between.
    Naive,
    /// The same for one chunk of tokens after the other, each computed again in backward.
    ChunkedRecompute,
    /// Chunk by chunk, with the gradients computed in forward, in the operands' dtypes.
    GradInForward,
    /// The loss of `fused-ce`.
    LinearCrossEntropy,
    /// The same with `round_logits_gradient`, as `frugal` has it: the gradient of logits is rounded to the operands' dtype, as in the others.
    RoundedGradient,
    /// The same with `round_logits`: on a GPU the logits are kept in the operands' dtype too. On a CPU it is the one before.
    RoundedLogits,
}

impl Implementation {
    /// All of them, in order.
    pub const ALL: [Self; 6] = [
        Self::Naive,
        Self::ChunkedRecompute,
        Self::GradInForward,
        Self::LinearCrossEntropy,
        Self::RoundedGradient,
        Self::RoundedLogits,
    ];

    /// Its name, as [`FromStr`] reads it.
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

    /// The options of `fused-ce`, for its own.
    pub(crate) fn options(self) -> Option<LinearCrossEntropy> {
        let [round_logits_gradient, round_logits] = match self {
            Self::LinearCrossEntropy => [false; 2],
            Self::RoundedGradient => [true, false],
            Self::RoundedLogits => [true; 2],
            Self::Naive | Self::ChunkedRecompute | Self::GradInForward => return None,
        };
        Some(LinearCrossEntropy { round_logits_gradient, round_logits, ..LinearCrossEntropy::default() })
    }

    /// The loss of hidden states `[…, h]`, a weight `[v, h]` and classes as targets (−100: ignored): a mean or a sum.
    /// If `chunk` is `None`, the second and third implementation take the assignment's. `labelled`: how many targets are classes, if a
    /// training's host knows it.
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

/// The dtype of logits: fp32, or f64 for f64.
fn tile_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// Tokens of a chunk: as asked for, else an eighth of all and at most 4096.
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
                "a budget of {budget} bytes is less than the {row} bytes of one row of logits"
            )));
        }
        Some(Chunk::Budget(budget)) => i64::try_from(budget / row).unwrap_or(i64::MAX),
        None => (tokens / 8).clamp(1, 4096),
    })
}
