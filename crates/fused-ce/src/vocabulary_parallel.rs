//! A vocabulary that several ranks share: each has some rows of W, and all have all tokens.
//!
//! Statistics of a row of logits can be put together from those of its slices: the largest logit is the largest of theirs, and
//! every sum is the sum of theirs, rescaled to it. So a chunk of tokens costs two reductions of a few numbers for each token (a
//! third where predictions are wanted), no logits travel, and the gradient of a rank's slice of W stays with it. The gradient
//! of the hidden states is summed over the ranks once, at the end. Source: Shoeybi et al., arXiv 1909.08053, section 3, whose
//! form holds a rank's slice of all logits.

use std::fmt::Debug;

use tch::Tensor;

use crate::error::{Error, Result};

/// How tensors of all ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// Their sum.
    Sum,
    /// Their largest element.
    Maximum,
}

/// Ranks that compute together: a process group, or threads of one process.
///
/// Every rank calls the same reductions in the same order, with tensors of one shape and dtype.
pub trait Group: Debug + Send + Sync {
    /// Puts the reduction of every rank's `tensor` into it.
    ///
    /// # Errors
    /// What goes wrong between the ranks.
    fn all_reduce(&self, tensor: &mut Tensor, reduce: Reduce) -> runtime::Result<()>;
}

/// A rank's slice of the vocabulary.
#[derive(Debug)]
pub struct Shard {
    /// The class of the slice's first row.
    pub first: i64,
    /// Number of classes of all slices together.
    pub vocabulary: i64,
    /// Rows of the largest slice. Chunks are planned for it, so that ranks with fewer rows make the same ones.
    pub widest: i64,
    /// The ranks.
    pub group: Box<dyn Group>,
}

impl Shard {
    /// The slice's first class and the number of all classes, for a weight of so many rows.
    pub(crate) fn range(&self, rows: i64) -> Result<(i64, i64)> {
        let Self { first, vocabulary, widest, .. } = *self;
        if first < 0 || first.checked_add(rows).is_none_or(|end| end > vocabulary) {
            let reason = format!(
                "a slice of {rows} rows from {first} on is not within a vocabulary of {vocabulary}; give each rank its own rows"
            );
            return Err(Error::Option(reason));
        }
        if !(rows..=vocabulary).contains(&widest) {
            let reason = format!(
                "the largest slice of {vocabulary} classes is said to have {widest} rows, and this one has {rows}; give each rank \
                 the same number, that of the largest"
            );
            return Err(Error::Option(reason));
        }
        Ok((first, vocabulary))
    }
}
