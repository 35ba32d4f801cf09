//! Messages of a SwiGLU's arguments. The type is the runtime's.

use std::fmt::Display;

pub use runtime::{Error, Result};
use tch::Kind;

/// An invalid argument.
pub(crate) fn refused(reason: impl Display) -> Error {
    Error::invalid("swiglu", reason)
}

/// A tensor without a floating dtype, or of another dtype than the others.
pub(crate) fn dtype(name: &str, kind: Kind, expected: impl Display) -> Error {
    refused(format!("`{name}` is {kind:?}; expected {expected}; convert it with `to_kind`"))
}

/// A size below 1.
pub(crate) fn too_small(name: &str, size: i64) -> Error {
    refused(format!("{name} is {size}; expected at least 1"))
}

/// A tile that is too small for one token.
pub(crate) fn tile(bytes: u64, token_bytes: u64) -> Error {
    refused(format!(
        "a tile of {bytes} bytes is below the {token_bytes} bytes that one token's temporaries take; give at least that, or use the \
         level `input-only`"
    ))
}

/// An MLP of a model that cannot be recomputed.
pub(crate) fn mlp(name: &str, reason: impl Display) -> Error {
    Error::Unsupported(format!("the MLP `{name}` {reason}"))
}
