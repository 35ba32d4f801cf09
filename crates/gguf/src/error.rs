//! Errors of conversions and of GGUF files.

use std::path::{Path, PathBuf};

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that is missing, truncated, invalid, or contradicts another.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem, and the remedy.
        reason: String,
    },
    /// Something that llama.cpp or this crate cannot represent.
    #[error("{what} is not supported: {found}; {remedy}")]
    Unsupported {
        /// The kind of thing, such as `model_type`.
        what: String,
        /// The unsupported value.
        found: String,
        /// An alternative that works.
        remedy: String,
    },
    /// A written file whose content differs from what was meant.
    #[error("{}: `{tensor}` was written wrongly ({reason}); remove the file and export again", path.display())]
    Written {
        /// The file.
        path: PathBuf,
        /// The tensor or the metadata key.
        tensor: String,
        /// The difference.
        reason: String,
    },
    /// The output of a conversion cannot be written.
    #[error("it cannot be written: {cause}")]
    Output {
        /// The cause.
        cause: std::io::Error,
    },
    /// A file that cannot be read or written.
    #[error("{}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        cause: std::io::Error,
    },
}

pub(crate) fn file_error(path: &Path, reason: impl Into<String>) -> Error {
    Error::File { path: path.to_owned(), reason: reason.into() }
}

pub(crate) fn io_error(path: &Path, cause: std::io::Error) -> Error {
    Error::Io { path: path.to_owned(), cause }
}

pub(crate) fn unsupported(
    what: impl Into<String>,
    found: impl Into<String>,
    remedy: impl Into<String>,
) -> Error {
    Error::Unsupported { what: what.into(), found: found.into(), remedy: remedy.into() }
}
