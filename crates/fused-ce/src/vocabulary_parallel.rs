//! Vocabulary parallelism: each rank holds some rows of W, and all ranks hold all tokens.
//!
//! The statistics of a row of logits reduce over its shards: the largest logit is the maximum of the shards' maxima, and every
//! sum is the sum of the shards' sums, rescaled to that maximum. So a chunk of tokens costs two all-reduces of a few numbers
//! per token (three with predictions). No logits are communicated, and the gradient of each shard of W stays on its rank. The
//! gradient of the hidden states is all-reduced once, at the end. Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053,
//! section 3, which holds all logits of a shard.

use std::fmt::Debug;

pub use runtime::collectives::ReduceOp;
use runtime::collectives::{Group, ReduceConfig};
use tch::Tensor;

use crate::error::{Result, refused};

/// A group of ranks: processes ([`Group`]), or threads of one process.
///
/// All ranks call the same reductions in the same order, with tensors of the same shape and dtype.
pub trait ProcessGroup: Debug + Send + Sync {
    /// Reduces `tensor` over all ranks, in place.
    ///
    /// # Errors
    /// The communication fails.
    fn all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> runtime::Result<()>;
}

/// Sums in the order of ranks, so that equal runs give equal bits.
impl ProcessGroup for Group {
    fn all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> runtime::Result<()> {
        let options = ReduceConfig { op, ..ReduceConfig::default() };
        if tensor.is_contiguous() {
            return Group::all_reduce(self, tensor, options, "cross-entropy");
        }
        let dense = tensor.f_contiguous()?;
        Group::all_reduce(self, &dense, options, "cross-entropy")?;
        Ok(tensor.f_copy_(&dense)?)
    }
}

/// A rank's shard of the vocabulary.
#[derive(Debug)]
pub struct Shard {
    /// The class of the first row of the shard.
    pub first: i64,
    /// Number of classes of all shards.
    pub vocabulary: i64,
    /// Rows of the largest shard. It sizes the chunks, so that all ranks have the same ones.
    pub widest: i64,
    /// The ranks.
    pub group: Box<dyn ProcessGroup>,
}

impl Shard {
    /// Returns the first class of the shard and the size of the vocabulary, for a weight with `rows` rows.
    pub(crate) fn range(&self, rows: i64) -> Result<(i64, i64)> {
        let Self { first, vocabulary, widest, .. } = *self;
        if first < 0 || first.checked_add(rows).is_none_or(|end| end > vocabulary) {
            let reason = format!(
                "a shard of {rows} rows starting at class {first} exceeds the vocabulary of {vocabulary}; give each rank its own rows"
            );
            return Err(refused(reason));
        }
        if !(rows..=vocabulary).contains(&widest) {
            let reason = format!(
                "`widest` is {widest}, but this shard of {vocabulary} classes has {rows} rows; set it to the rows of the largest \
                 shard on every rank"
            );
            return Err(refused(reason));
        }
        Ok((first, vocabulary))
    }
}
