//! The arguments of a forward pass.

use tch::Tensor;

use crate::attention::Documents;
use crate::key_value_cache::Extension;
use crate::mixture::RouterBalance;
use crate::sequence_parallel::SequenceShard;

/// Arguments of a forward pass besides the input.
#[derive(Debug, Clone, Copy, Default)]
pub struct Context<'a> {
    /// Document boundaries of packed rows; `None` if each row is one document.
    pub documents: Option<&'a Documents>,
    /// `[batch, sequence]`, int64: the position of each token, for blocks with rotary embeddings; `None` for 0, 1, 2, … in every row.
    /// A model sets it from [`Input::positions`].
    pub positions: Option<&'a Tensor>,
    /// The KV cache, with positions reserved for these tokens; `None` to read whole rows. See
    /// [`key_value_cache`](crate::key_value_cache).
    pub extension: Option<&'a Extension<'a>>,
    /// Whether dropout is active.
    pub training: bool,
    /// Whether the head counts correct predictions.
    pub accuracy: bool,
    /// The number of labels other than [`IGNORE_INDEX`](super::IGNORE_INDEX), or more, if it is known: on a GPU a head may skip the other
    /// positions without waiting for the labels.
    pub labelled_tokens: Option<i64>,
    /// `[batch, sequence]`, fp32: the factor of the loss of each label, in [`LossHead::loss`](super::LossHead::loss) and
    /// [`LossHead::distilled_loss`](super::LossHead::distilled_loss); `None` for 1.
    pub label_weights: Option<&'a Tensor>,
    /// `[batch, sequence]`, fp32: the strength of the noise of each token's embedding ([`add_noise`](crate::add_noise)); `None` for no noise.
    pub embedding_noise: Option<&'a Tensor>,
    /// The sums of the load-balancing loss of the routers, if it is to be computed.
    pub balance: Option<&'a RouterBalance>,
    /// This rank's part of the rows, whose tokens the input has; `None` for whole rows. `documents` are those of whole rows, and
    /// `positions` are given. See [`sequence_parallel`](crate::sequence_parallel).
    pub sequence: Option<&'a SequenceShard>,
}

/// A [`Context`] that owns its values, for recomputation. It shares the tensors of the original, and has no cache: generation is never
/// recomputed.
#[derive(Debug)]
pub struct OwnedContext {
    documents: Option<Documents>,
    positions: Option<Tensor>,
    training: bool,
    accuracy: bool,
    labelled_tokens: Option<i64>,
    label_weights: Option<Tensor>,
    balance: Option<RouterBalance>,
    sequence: Option<SequenceShard>,
}

impl From<&Context<'_>> for OwnedContext {
    fn from(context: &Context<'_>) -> Self {
        let &Context { training, accuracy, labelled_tokens, .. } = context;
        Self {
            documents: context.documents.map(Documents::shallow_clone),
            positions: context.positions.map(Tensor::shallow_clone),
            training,
            accuracy,
            labelled_tokens,
            label_weights: context.label_weights.map(Tensor::shallow_clone),
            balance: context.balance.cloned(),
            sequence: context.sequence.cloned(),
        }
    }
}

impl OwnedContext {
    /// Borrows it as a [`Context`].
    pub fn borrow(&self) -> Context<'_> {
        let &Self { training, accuracy, labelled_tokens, .. } = self;
        Context {
            documents: self.documents.as_ref(),
            positions: self.positions.as_ref(),
            extension: None,
            training,
            accuracy,
            labelled_tokens,
            label_weights: self.label_weights.as_ref(),
            // No block embeds tokens.
            embedding_noise: None,
            balance: self.balance.as_ref(),
            sequence: self.sequence.as_ref(),
        }
    }
}

/// The input of a language model.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// `[batch, sequence]`, int64.
    pub tokens: &'a Tensor,
    /// `[batch, sequence]`, int64: the position of each token in its document; `None` for 0, 1, 2, … in every row.
    pub positions: Option<&'a Tensor>,
    /// Further arguments.
    pub context: Context<'a>,
}

impl<'a> Input<'a> {
    /// Creates an input of rows with one document each, for evaluation.
    pub fn new(tokens: &'a Tensor) -> Self {
        Self { tokens, positions: None, context: Context::default() }
    }

    /// Creates an input of rows with one document each, for training.
    pub fn training(tokens: &'a Tensor) -> Self {
        Self { context: Context { training: true, ..Context::default() }, ..Self::new(tokens) }
    }
}
