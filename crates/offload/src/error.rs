//! What can go wrong, in words that name the remedy.

use std::path::PathBuf;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A combination of options, or a model, that cannot be offloaded.
    #[error("offload: {what}: {reason}")]
    Config {
        /// Which part of it.
        what: &'static str,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A layer that could not be brought to the device, or its gradients to the host. The model on the host is as it was.
    #[error("offload: {what} of `{layer}` failed: {cause}; the model on the host is as it was")]
    Transfer {
        /// Which way.
        what: &'static str,
        /// The layer.
        layer: String,
        /// Why.
        cause: Box<runtime::Error>,
    },
    /// A file under the file tier.
    #[error("offload: {}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// The model refused.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// The optimizer refused.
    #[error(transparent)]
    Training(#[from] training::Error),
    /// The runtime refused.
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
