//! From what every framework does to what this crate does, over one oracle: the first rung in f64.
//!
//! | rung | logits at a time | products | gradient of W summed in | rows without a label |
//! |---|---|---|---|---|
//! | [`Naive`](Rung::Naive) | all, and as much again three times over | 3 | one product | computed |
//! | [`ChunkedRecompute`](Rung::ChunkedRecompute) | one chunk's | 4 | W's dtype | computed |
//! | [`GradInForward`](Rung::GradInForward) | one chunk's | 3 | W's dtype | computed |
//! | [`LinearCrossEntropy`](Rung::LinearCrossEntropy) | one chunk's, once | 3 | fp32 | dropped |
//!
//! The third is the way of Malek's `efficient_cross_entropy`, which the assignment takes up with chunks of an eighth of the
//! tokens and at most 4096, and of Liger.

mod chunked_recompute;
mod grad_in_forward;
mod naive;

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::inputs::{Inputs, Targets};
use crate::linear_cross_entropy::Output;
use crate::options::{Chunk, LinearCrossEntropy, LogSumExp, Reduction};

/// A way to compute the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rung {
    /// All logits, then the cross-entropy, by libtorch's operators and graph; low precision is taken to fp32 in between. Takes
    /// every option but slices of the vocabulary.
    Naive,
    /// The same for one chunk of tokens after the other, each computed again in backward. Takes every option but slices and
    /// adapters.
    ChunkedRecompute,
    /// Chunk by chunk, with the gradients computed in forward, in the operands' dtypes. Classes, an ignore index, means and sums
    /// only.
    GradInForward,
    /// This crate's.
    LinearCrossEntropy,
}

impl Rung {
    /// All of them, in order.
    pub const ALL: [Self; 4] =
        [Self::Naive, Self::ChunkedRecompute, Self::GradInForward, Self::LinearCrossEntropy];

    /// Its name, as [`FromStr`] reads it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::ChunkedRecompute => "chunked-recompute",
            Self::GradInForward => "grad-in-forward",
            Self::LinearCrossEntropy => "linear-cross-entropy",
        }
    }

    /// Computes the loss this way. Chunks are as `options` says; where it does not, the second and third rung take the
    /// assignment's.
    ///
    /// # Errors
    /// As [`LinearCrossEntropy::run`]; an option that the rung does not take.
    pub fn run(self, inputs: &Inputs<'_>, options: &LinearCrossEntropy) -> Result<Output> {
        match self {
            Self::Naive => naive::run(inputs, options),
            Self::ChunkedRecompute => chunked_recompute::run(inputs, options),
            Self::GradInForward => grad_in_forward::run(inputs, options),
            Self::LinearCrossEntropy => options.run(inputs),
        }
    }

    fn refuse<T>(self, what: &str) -> Result<T> {
        Err(Error::Option(format!("`{self}` does not take {what}; `{}` does", Self::LinearCrossEntropy)))
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Rung {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|rung| rung.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::Option(format!("unknown rung `{text}`; expected one of {names}"))
        })
    }
}

/// Tokens of a chunk: as asked for, else an eighth of all and at most 4096.
fn chunk_tokens(chunk: Option<Chunk>, tokens: i64, vocabulary: i64, element: usize) -> Result<i64> {
    let row = vocabulary.unsigned_abs() * element as u64;
    Ok(match chunk {
        Some(Chunk::Tokens(tokens)) => tokens,
        Some(Chunk::Budget(budget)) if budget < row => return Err(Error::Budget { budget, row, vocabulary }),
        Some(Chunk::Budget(budget)) => i64::try_from(budget / row).unwrap_or(i64::MAX),
        None => (tokens / 8).clamp(1, 4096),
    })
}

/// Whether libtorch's own cross-entropy computes this loss.
fn is_pytorchs(inputs: &Inputs<'_>, options: &LinearCrossEntropy) -> bool {
    matches!(inputs.targets, Targets::Classes(_))
        && inputs.token_weights.is_none()
        && inputs.denominator.is_none()
        && options.z_loss == 0.0
        && options.reduction != Reduction::None
        && options.log_sum_exp == LogSumExp::No
}
