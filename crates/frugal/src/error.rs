//! Errors of this crate.

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A generated number that is no token id.
    #[error("a generated token is no id")]
    NotAToken,
    /// Data or a tokenizer.
    #[error(transparent)]
    Data(#[from] dataloading::Error),
}
