//! Errors of this crate.

use std::path::PathBuf;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An invalid configuration of a decoder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Sizes or options that are invalid, contradict each other or are not supported.
    #[error("{what}: {reason}")]
    Config {
        /// The part of the configuration.
        what: &'static str,
        /// The problem, and the remedy.
        reason: String,
    },
    /// An unknown name of a family.
    #[error("unknown model family `{given}`; known are: {known}")]
    UnknownFamily {
        /// The name.
        given: String,
        /// The names of all families, separated by commas.
        known: String,
    },
    /// A missing or invalid file.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
}
