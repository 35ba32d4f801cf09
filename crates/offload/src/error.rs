//! Messages of offloading. The type is the runtime's.

use std::fmt::Display;
use std::path::Path;

pub use runtime::{Error, Result};

/// Invalid options, or a model that cannot be offloaded.
pub(crate) fn refused(part: &str, reason: impl Display) -> Error {
    Error::Invalid(format!("offload: {part}: {reason}"))
}

/// A failed transfer of a layer or its gradients.
pub(crate) fn transfer(transfer: &str, layer: &str, cause: Error) -> Error {
    let message =
        format!("offload: {transfer} of `{layer}` failed: {cause}; the model on the host is unchanged");
    cause.with_message(message)
}

/// A file of the file tier.
pub(crate) fn file(path: impl AsRef<Path>, reason: impl Display) -> Error {
    Error::file(path, reason).context("offload")
}
