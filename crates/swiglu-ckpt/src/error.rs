//! What can be wrong with a SwiGLU's arguments.

use tch::{Device, Kind};

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An MLP of a model that cannot be recomputed.
    #[error("the MLP `{name}` {reason}")]
    Mlp {
        /// The MLP's name in the model.
        name: String,
        /// Why, and what to do.
        reason: String,
    },
    /// A tensor of another shape than the operation needs.
    #[error("swiglu: `{name}` has shape {found:?}; expected {expected}")]
    Shape {
        /// Which tensor.
        name: &'static str,
        /// Its shape.
        found: Vec<i64>,
        /// What was expected, in words.
        expected: String,
    },
    /// A tensor that is not floating point, or of another dtype than the rest.
    #[error("swiglu: `{name}` is {found:?}; expected {expected}; convert it with `to_kind`")]
    Dtype {
        /// Which tensor.
        name: &'static str,
        /// Its dtype.
        found: Kind,
        /// What was expected.
        expected: String,
    },
    /// A tensor on another device than the rest.
    #[error("swiglu: `{name}` is on {found:?} and `x` on {expected:?}; move one with `to_device`")]
    DeviceMismatch {
        /// Which tensor.
        name: &'static str,
        /// Its device.
        found: Device,
        /// Where the input is.
        expected: Device,
    },
    /// A tensor that was never made.
    #[error("swiglu: `{name}` is an undefined tensor; give one with values")]
    Undefined {
        /// Which tensor.
        name: &'static str,
    },
    /// Weights that hold NaN or infinity.
    #[error("swiglu: `{name}` holds {count} values that are not finite; load or initialise it again")]
    NotFinite {
        /// Which weight.
        name: &'static str,
        /// How many values.
        count: i64,
    },
    /// A size that makes no MLP.
    #[error("swiglu: {name} is {found}; expected at least 1")]
    Size {
        /// Which size.
        name: &'static str,
        /// What came.
        found: i64,
    },
    /// A tile too small for one token.
    #[error(
        "swiglu: a tile of {bytes} bytes is below the {token_bytes} bytes that one token's temporaries take; give at \
         least that, or use the level `input-only`"
    )]
    Tile {
        /// The tile's size as given.
        bytes: u64,
        /// What one token takes.
        token_bytes: u64,
    },
    /// A level's name or number that does not exist.
    #[error(
        "unknown checkpoint level `{0}`; expected save-all (or 0), save-gate-up, save-one, input-only (or 1), or input-only-tiled:BYTES (for example input-only-tiled:16MiB)"
    )]
    UnknownLevel(String),
    /// The runtime refused.
    #[error(transparent)]
    Runtime(#[from] runtime::Error),
}

impl From<Error> for runtime::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Runtime(error) => error,
            other => Self::Other(Box::new(other)),
        }
    }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Runtime(error.into())
    }
}
