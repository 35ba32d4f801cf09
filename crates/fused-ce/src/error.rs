//! Errors of the loss.

use tch::{Device, Kind};

/// A result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor with an unexpected shape.
    #[error("linear cross-entropy: `{name}` has shape {found:?}; expected {expected}")]
    Shape {
        /// Name of the tensor.
        name: &'static str,
        /// Its shape.
        found: Vec<i64>,
        /// The expected shape, in words.
        expected: String,
    },
    /// A tensor with an unexpected dtype.
    #[error("linear cross-entropy: `{name}` is {found:?}; expected {expected}; convert it with `to_kind`")]
    Dtype {
        /// Name of the tensor.
        name: &'static str,
        /// Its dtype.
        found: Kind,
        /// The expected dtype.
        expected: String,
    },
    /// A tensor on another device than the hidden states.
    #[error(
        "linear cross-entropy: `{name}` is on {found:?} and `hidden` on {expected:?}; move one with `to_device`"
    )]
    DeviceMismatch {
        /// Name of the tensor.
        name: &'static str,
        /// Its device.
        found: Device,
        /// The device of the hidden states.
        expected: Device,
    },
    /// An undefined tensor.
    #[error("linear cross-entropy: `{name}` is an undefined tensor; pass a tensor with values")]
    Undefined {
        /// Name of the tensor.
        name: &'static str,
    },
    /// A target outside the vocabulary.
    #[error(
        "linear cross-entropy: target {found} at position {position} is outside the vocabulary of {vocabulary} (0 to {}) and is \
         not the ignore index {ignore_index}; use the tokenizer of the model, or set the ignore index",
        vocabulary - 1
    )]
    Target {
        /// The target.
        found: i64,
        /// Its index among the targets of all rows in order.
        position: usize,
        /// Number of classes.
        vocabulary: i64,
        /// The target of ignored tokens.
        ignore_index: i64,
    },
    /// A budget smaller than one row of logits.
    #[error(
        "linear cross-entropy: a budget of {budget} bytes is less than the {row} bytes of one row of {vocabulary} logits; \
         increase it, or set a number of tokens"
    )]
    Budget {
        /// The budget in bytes.
        budget: u64,
        /// Bytes of one row.
        row: u64,
        /// Length of a row.
        vocabulary: i64,
    },
    /// An option outside its range, or options that exclude each other.
    #[error("linear cross-entropy: {0}")]
    Option(String),
    /// A head that is not one projection.
    #[error(
        "linear cross-entropy cannot replace the head `{head}` with the tensors {found:?}; expected `weight` [vocabulary, \
         hidden], with or without `bias`"
    )]
    Head {
        /// Its name in the model.
        head: String,
        /// Names of its tensors.
        found: Vec<String>,
    },
    /// An error of `models`.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// An error of `runtime`.
    #[error(transparent)]
    Runtime(#[from] runtime::Error),
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Runtime(error.into())
    }
}

impl From<Error> for runtime::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Runtime(error) => error,
            other => Self::Other(Box::new(other)),
        }
    }
}
