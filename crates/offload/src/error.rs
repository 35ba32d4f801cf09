//! Errors of offloading, with their remedies.

use std::path::PathBuf;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Invalid options, or a model that cannot be offloaded.
    #[error("offload: {what}: {reason}")]
    Config {
        /// The part concerned.
        what: &'static str,
        /// The problem, and the remedy.
        reason: String,
    },
    /// A failed transfer of a layer or its gradients. The model on the host is unchanged.
    #[error("offload: {what} of `{layer}` failed: {cause}; the model on the host is unchanged")]
    Transfer {
        /// The kind of transfer.
        what: &'static str,
        /// The layer.
        layer: String,
        /// The cause.
        cause: Box<runtime::Error>,
    },
    /// A file of the file tier.
    #[error("offload: {}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem, and the remedy.
        reason: String,
    },
    /// An error of the model.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// An error of the optimizer.
    #[error(transparent)]
    Training(#[from] training::Error),
    /// An error of the runtime.
    #[error(transparent)]
    Runtime(#[from] runtime::Error),
}

impl Error {
    pub(crate) fn config(what: &'static str, reason: impl Into<String>) -> Self {
        Self::Config { what, reason: reason.into() }
    }
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
            Error::Model(error) => error.into(),
            other => Self::Other(Box::new(other)),
        }
    }
}

impl From<Error> for training::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Training(error) => error,
            other => runtime::Error::from(other).into(),
        }
    }
}

impl From<Error> for models::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Model(error) => error,
            other => runtime::Error::from(other).into(),
        }
    }
}
