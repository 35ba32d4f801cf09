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
    /// The sequences whose probabilities an objective compares; `None` for an objective of single tokens.
    pub sequences: Option<Sequences>,
    /// A teacher's most probable tokens; `None` for another objective, or a teacher that is at hand.
    pub taught: Option<TopK>,
    /// The weights of examples; `None` if each has the weight 1.
    pub weights: Option<ExampleWeights>,
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
    /// Whether the documents are the rows of the data, end to end in one row, and a part of them may be computed alone. Otherwise the rows of the
    /// batch may.
    pub is_padding_free: bool,
}

/// The k most probable next tokens of each position, by a teacher. Positions without a label have zeros.
#[derive(Debug)]
pub struct TopK {
    /// `[rows, length, k]`, int64, on the batch's device.
    pub tokens: Tensor,
    /// `[rows, length, k]`, fp32: their log-probabilities.
    pub log_probabilities: Tensor,
}

/// Completions that an objective takes as wholes, such as the chosen and the rejected one of a pair.
#[derive(Debug)]
pub struct Sequences {
    /// `[rows, length]`, int64, on the batch's device: the number of the sequence that a label belongs to, from 0; the number of sequences
    /// for a label before its sequence, in the prompt. Positions without a label have any of these.
    pub ids: Tensor,
    /// `[sequences]`, fp32, on the batch's device: the labels of each.
    pub lengths: Tensor,
    /// `[sequences]`, fp32, on the batch's device: the log-probability of each by a reference model; `None` if it is not known.
    pub reference: Option<Tensor>,
    /// Labels of the chosen sequences of pairs, with those of their prompts.
    pub chosen_targets: usize,
    /// Of an objective over desirable and undesirable answers; `None` if sequences are pairs of a chosen and a rejected one.
    pub ratings: Option<Ratings>,
}

/// Which sequences are desirable.
#[derive(Debug)]
pub struct Ratings {
    /// `[sequences]`, fp32, on the batch's device: 1 for a desirable one, −1 for an undesirable one.
    pub signs: Tensor,
    /// The number of desirable ones.
    pub desirable: usize,
    /// The prompts of the sequences with answers of other prompts, in the sequences' order, with their own [`Sequences`] without ratings. Packed
    /// batches have them in another order.
    pub mismatched: Box<Batch>,
}

impl Sequences {
    /// Returns the number of sequences.
    pub fn count(&self) -> i64 {
        self.lengths.numel() as i64
    }

    /// Returns the number of examples: pairs, or rated sequences.
    pub fn examples(&self) -> usize {
        self.lengths.numel() / if self.ratings.is_some() { 1 } else { 2 }
    }

    /// Returns the numbers of sequences that are chosen or desirable, and that are rejected or undesirable.
    pub fn chosen_and_rejected(&self) -> [usize; 2] {
        let all = self.lengths.numel();
        let chosen = self.ratings.as_ref().map_or(all / 2, |ratings| ratings.desirable);
        [chosen, all - chosen]
    }
}

/// Weights of examples: factors of their losses. The loss of a step is a weighted mean: Σ w·ℓ / Σ w over its labels, or over the
/// examples of an objective over sequences.
#[derive(Debug)]
pub struct ExampleWeights {
    /// `[rows, length]`, fp32, on the batch's device: for each position the weight of its example; 0 for padding.
    pub positions: Tensor,
    /// `[examples]`, fp32, on the batch's device: for an objective over sequences ([`Sequences::examples`]).
    pub examples: Option<Tensor>,
    /// Σ w over labels, or over the examples of an objective over sequences.
    pub total: f64,
    /// Σ w over the labels that [`Sequences::chosen_targets`] counts.
    pub chosen_targets: f64,
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
