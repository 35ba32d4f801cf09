//! What a loader hands out.

use tch::Tensor;

/// The label of a position that has nothing to predict.
pub const IGNORED: i64 = -100;

/// Rows of tokens on one device, with what to predict at each place.
#[derive(Debug)]
pub struct Batch {
    /// `[rows, length]`, int64.
    pub tokens: Tensor,
    /// `[rows, length]`, int64: the token that follows in the same document, [`IGNORED`] where there is none (the last
    /// token of a document, padding).
    pub labels: Tensor,
    /// Where packed documents lie; `None` when each row is one document.
    pub packing: Option<Packing>,
    /// Counts, on the host.
    pub counts: Counts,
}

/// Where the documents of packed rows lie. A document never crosses a row; what pads the end of a row counts as a document
/// of its own here, so that the lengths cover every place.
#[derive(Debug)]
pub struct Packing {
    /// `[rows, length]`, int64: 0, 1, 2, … from the start of each document.
    pub positions: Tensor,
    /// `[rows, length]`, int64: the number of each place's document within the batch, from 0.
    pub document_ids: Tensor,
    /// `[documents + 1]`, int32, on the batch's device: where each document starts among the `rows · length` places.
    pub cu_seqlens: Tensor,
    /// The same on the host.
    pub starts: Vec<i32>,
    /// The longest document.
    pub longest: i64,
}

/// What a batch consists of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Documents, or samples.
    pub documents: usize,
    /// Places that hold a token of a document.
    pub tokens: usize,
    /// Places that pad.
    pub padding: usize,
    /// Places that have a label: what a mean loss divides by.
    pub targets: usize,
    /// Tokens that were left out because they did not fit.
    pub dropped: usize,
}
