//! Attention over rows of one document each, or of packed documents.
use tch::Tensor;

/// Where the documents of packed rows lie. A document never crosses a row, and the documents cover every place (what pads
/// the end of a row is a document of its own).
#[derive(Debug)]
pub struct Documents {
    /// `[batch, sequence]`, int64: the number of each place's document within the batch.
    pub ids: Tensor,
    /// `[documents + 1]`, int32, on the device of the ids: where each document starts among all places.
    pub cu_seqlens: Tensor,
    /// The same on the host.
    pub starts: Vec<i32>,
    /// The longest document.
    pub longest: i64,
}
