//! Errors of a SwiGLU's arguments.

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
        /// The reason, and the remedy.
        reason: String,
    },
    /// A tensor of the wrong shape.
    #[error("swiglu: `{name}` has shape {found:?}; expected {expected}")]
    Shape {
        /// The tensor's name.
        name: &'static str,
        /// Its shape.
        found: Vec<i64>,
        /// The expected shape, in words.
        expected: String,
    },
    /// A tensor without a floating dtype, or of another dtype than the others.
    #[error("swiglu: `{name}` is {found:?}; expected {expected}; convert it with `to_kind`")]
    Dtype {
        /// The tensor's name.
        name: &'static str,
        /// Its dtype.
        found: Kind,
        /// The expected value.
        expected: String,
    },
    /// A tensor on another device than the others.
    #[error("swiglu: `{name}` is on {found:?} and `x` on {expected:?}; move one with `to_device`")]
    DeviceMismatch {
        /// The tensor's name.
        name: &'static str,
        /// Its device.
        found: Device,
        /// The input's device.
        expected: Device,
    },
    /// An undefined tensor.
    #[error("swiglu: `{name}` is an undefined tensor; give one with values")]
    Undefined {
        /// The tensor's name.
        name: &'static str,
    },
    /// Weights with NaN or infinity.
    #[error("swiglu: `{name}` has {count} values that are not finite; load or initialise it again")]
    NotFinite {
        /// The weight's name.
        name: &'static str,
        /// The number of such values.
        count: i64,
    },
    /// An invalid size.
    #[error("swiglu: {name} is {found}; expected at least 1")]
    Size {
        /// The size's name.
        name: &'static str,
        /// Its value.
        found: i64,
    },
    /// A tile that is too small for one token.
    #[error(
        "swiglu: a tile of {bytes} bytes is below the {token_bytes} bytes that one token's temporaries take; give at \
         least that, or use the level `input-only`"
    )]
    Tile {
        /// The tile's size.
        bytes: u64,
        /// Bytes per token.
        token_bytes: u64,
    },
    /// An unknown level.
    #[error(
        "unknown checkpoint level `{0}`; expected save-all (or 0), save-gate-up, save-one, input-only (or 1), or input-only-tiled:BYTES (for example input-only-tiled:16MiB)"
    )]
    UnknownLevel(String),
    /// An error of the runtime.
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
