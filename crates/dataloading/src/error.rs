//! What can be wrong with data, and with how it is asked for.

use std::path::PathBuf;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting that makes no loader, sampler or packer.
    #[error("{what}: {reason}")]
    Config {
        /// Which setting or part.
        what: &'static str,
        /// What came, what was expected, and what to do.
        reason: String,
    },
    /// A data set without anything to train on.
    #[error("{from}: {reason}")]
    Empty {
        /// The file or data set.
        from: String,
        /// What is missing and what to do.
        reason: String,
    },
    /// A record that cannot be used, with its place.
    #[error("{from}: {place}: {reason}")]
    Record {
        /// The file or data set.
        from: String,
        /// Line, byte or sample.
        place: String,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A file that is not what it should be.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it and what to do.
        reason: String,
    },
    /// A file could not be read or written.
    #[error("{}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        cause: std::io::Error,
    },
    /// The tokenizer refused.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A worker of the loader panicked.
    #[error("a worker of the loader panicked at batch {batch} of epoch {epoch}: {message}")]
    Worker {
        /// The epoch.
        epoch: u64,
        /// The batch within it.
        batch: u64,
        /// The panic's words.
        message: String,
    },
    /// An error while a batch was made, with its place.
    #[error("batch {batch} of epoch {epoch}: {cause}")]
    Batch {
        /// The epoch.
        epoch: u64,
        /// The batch within it.
        batch: u64,
        /// What went wrong.
        cause: Box<Error>,
    },
    /// The runtime refused.
    #[error(transparent)]
    Runtime(#[from] runtime::Error),
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Runtime(error.into())
    }
}
