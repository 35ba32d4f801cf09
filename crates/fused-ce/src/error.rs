//! What can be wrong with a loss's arguments.

use tch::{Device, Kind};

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor of another shape than the operation needs.
    #[error("linear cross-entropy: `{name}` has shape {found:?}; expected {expected}")]
    Shape {
        /// Which tensor.
        name: &'static str,
        /// Its shape.
        found: Vec<i64>,
        /// What was expected, in words.
        expected: String,
    },
    /// A tensor of a dtype that does not fit.
    #[error("linear cross-entropy: `{name}` is {found:?}; expected {expected}; convert it with `to_kind`")]
    Dtype {
        /// Which tensor.
        name: &'static str,
        /// Its dtype.
        found: Kind,
        /// What was expected.
        expected: String,
    },
    /// A tensor on another device than the rest.
    #[error(
        "linear cross-entropy: `{name}` is on {found:?} and `hidden` on {expected:?}; move one with `to_device`"
    )]
    DeviceMismatch {
        /// Which tensor.
        name: &'static str,
        /// Its device.
        found: Device,
        /// Where the hidden states are.
        expected: Device,
    },
    /// A tensor that was never made.
    #[error("linear cross-entropy: `{name}` is an undefined tensor; give one with values")]
    Undefined {
        /// Which tensor.
        name: &'static str,
    },
    /// A target that names no class.
    #[error(
        "linear cross-entropy: target {found} at place {place} is outside the vocabulary of {vocabulary} (0 to {}) and is not \
         the ignore index {ignore_index}; the tokenizer and the model do not belong together, or the ignore index is another",
        vocabulary - 1
    )]
    Target {
        /// The target.
        found: i64,
        /// Where, counting the places of all rows in order.
        place: usize,
        /// Number of classes.
        vocabulary: i64,
        /// The target that means none.
        ignore_index: i64,
    },
    /// A budget that holds no row of logits.
    #[error(
        "linear cross-entropy: a budget of {budget} bytes is below the {row} bytes that one row of {vocabulary} logits takes; \
         give at least that, or a number of tokens"
    )]
    Budget {
        /// As given.
        budget: u64,
        /// What one row takes.
        row: u64,
        /// Length of a row.
        vocabulary: i64,
    },
    /// An option outside its range, or options that exclude each other.
    #[error("linear cross-entropy: {0}")]
    Option(String),
    /// A head whose tensors are not those of one projection.
    #[error(
        "linear cross-entropy cannot take the place of the head `{head}`, which has the tensors {found:?}; expected `weight` \
         [vocabulary, hidden], with or without `bias`"
    )]
    Head {
        /// Its name in the model.
        head: String,
        /// Names of its tensors.
        found: Vec<String>,
    },
    /// The model refused.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// The runtime refused.
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
