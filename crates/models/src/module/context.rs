//! What a forward pass is given.

use tch::Tensor;

use crate::attention::Documents;
use crate::generation::Extension;

/// What a forward pass knows besides its input.
#[derive(Debug, Clone, Copy, Default)]
pub struct Context<'a> {
    /// Where the documents of packed rows lie; `None` when each row is one document.
    pub documents: Option<&'a Documents>,
    /// `[batch, sequence]`, int64: the place of each token, for blocks that turn with it; `None` for 0, 1, 2, … in every row. A
    /// model puts [`Input::positions`] here.
    pub positions: Option<&'a Tensor>,
    /// Room in a cache for these tokens' keys and values, behind those of the tokens that they follow; `None` where rows are read
    /// whole. See [`generation`](crate::generation).
    pub extension: Option<&'a Extension<'a>>,
    /// Whether dropout drops.
    pub training: bool,
    /// Whether the head counts right predictions.
    pub accuracy: bool,
}

/// A [`Context`] that borrows nothing, for what computes again later. It shares the tensors of the one it was made from, and knows of
/// no cache: what was generated is not computed again.
#[derive(Debug)]
pub struct OwnedContext {
    documents: Option<Documents>,
    positions: Option<Tensor>,
    training: bool,
    accuracy: bool,
}

impl From<&Context<'_>> for OwnedContext {
    fn from(context: &Context<'_>) -> Self {
        let &Context { documents, positions, extension: _, training, accuracy } = context;
        let positions = positions.map(Tensor::shallow_clone);
        Self { documents: documents.map(Documents::shallow_clone), positions, training, accuracy }
    }
}

impl OwnedContext {
    /// The context that it was made from.
    pub fn borrow(&self) -> Context<'_> {
        let &Self { ref documents, ref positions, training, accuracy } = self;
        Context {
            documents: documents.as_ref(),
            positions: positions.as_ref(),
            extension: None,
            training,
            accuracy,
        }
    }
}

/// What a language model reads.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// `[batch, sequence]`, int64.
    pub tokens: &'a Tensor,
    /// `[batch, sequence]`, int64: the place of each token in its document; `None` for 0, 1, 2, … in every row.
    pub positions: Option<&'a Tensor>,
    /// What else there is to know.
    pub context: Context<'a>,
}

impl<'a> Input<'a> {
    /// Rows of one document each, for evaluation.
    pub fn new(tokens: &'a Tensor) -> Self {
        Self { tokens, positions: None, context: Context::default() }
    }
}
