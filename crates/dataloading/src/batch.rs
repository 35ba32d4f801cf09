//! The batches of a loader.

use tch::Tensor;

/// The label of a position without a target, as PyTorch's `ignore_index`.
pub const IGNORE_INDEX: i64 = -100;

/// Rows of tokens on one device, with the label of each position.
#[derive(Debug)]
pub struct Batch {
    /// `[rows, length]`, int64.
    pub tokens: Tensor,
    /// `[rows, length]`, int64: the next token of the same document, or [`IGNORE_INDEX`] for the last token of a document and
    /// for padding.
    pub labels: Tensor,
    /// The documents of packed rows; `None` if each row is one document.
    pub packing: Option<Packing>,
    /// Positions of padding at the end of each row, on the host; empty if no row has any.
    pub padding: Vec<i64>,
    /// Counts, on the host.
    pub counts: Counts,
}

/// The documents of packed rows. A document never spans two rows; the padding at the end of a row counts as a document
/// here, so that the documents cover all positions.
#[derive(Debug)]
pub struct Packing {
    /// `[rows, length]`, int64: 0, 1, 2, … from the start of each document.
    pub positions: Tensor,
    /// `[rows, length]`, int64: the index of the document of each position, from 0 within the batch.
    pub document_ids: Tensor,
    /// `[documents + 1]`, int32, on the batch's device: the start of each document among the `rows · length` positions
    /// (`cu_seqlens`).
    pub cu_seqlens: Tensor,
    /// The same on the host.
    pub starts: Vec<i32>,
    /// The length of the longest document.
    pub longest: i64,
}

/// Counts of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Documents, or samples.
    pub documents: usize,
    /// Positions with a token of a document.
    pub tokens: usize,
    /// Padding positions.
    pub padding: usize,
    /// Positions with a label: the denominator of a mean loss. On a GPU no more of them are computed.
    pub targets: usize,
    /// Tokens dropped because they did not fit.
    pub dropped: usize,
}
