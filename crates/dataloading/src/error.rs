//! The error of this crate. Each variant names the file, record, batch or option; its message ends with the remedy.

use std::path::PathBuf;

/// A result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid option of a loader, sampler or packer.
    #[error("{what}: {reason}")]
    Config {
        /// The part or option.
        what: &'static str,
        /// The value, what was expected, and the remedy.
        reason: String,
    },
    /// A data set without usable samples.
    #[error("{from}: {reason}")]
    Empty {
        /// The file or data set.
        from: String,
        /// The missing part, and the remedy.
        reason: String,
    },
    /// An invalid record.
    #[error("{from}: {location}: {reason}")]
    Record {
        /// The file or data set.
        from: String,
        /// The line, byte or sample.
        location: String,
        /// The problem and the remedy.
        reason: String,
    },
    /// An invalid file.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem and the remedy.
        reason: String,
    },
    /// A file could not be read or written.
    #[error("{}: {}", path.display(), plain_message(cause))]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        cause: std::io::Error,
    },
    /// A chat template that is invalid, fails, or refuses a conversation.
    #[error("{from}{}: {reason}", line.map_or_else(String::new, |line| format!(", line {line}")))]
    Template {
        /// The template's file.
        from: String,
        /// The line of the template, from 1, if it is known.
        line: Option<usize>,
        /// The problem and the remedy.
        reason: String,
    },
    /// An error of the tokenizer.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A worker of the loader panicked.
    #[error("a worker of the loader panicked at batch {batch} of epoch {epoch}: {message}")]
    Worker {
        /// The epoch.
        epoch: u64,
        /// The batch of the epoch.
        batch: u64,
        /// The message of the panic.
        message: String,
    },
    /// An error while making a batch.
    #[error("batch {batch} of epoch {epoch}: {cause}")]
    Batch {
        /// The epoch.
        epoch: u64,
        /// The batch of the epoch.
        batch: u64,
        /// The error.
        cause: Box<Error>,
    },
    /// An error of `runtime`.
    #[error(transparent)]
    Runtime(#[from] runtime::Error),
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Runtime(error.into())
    }
}

/// Returns the operating system's message, in plain words for the common errors.
fn plain_message(cause: &std::io::Error) -> String {
    match cause.kind() {
        std::io::ErrorKind::NotFound => "there is no such file or folder".to_owned(),
        _ => cause.to_string(),
    }
}
