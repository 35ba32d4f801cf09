//! The error of every library over libtorch.
//!
//! One type, because fine-grained ones do not compose: a model's part runs in an optimizer's closure in an autograd function, and its error
//! has to come out as it went in. `kernels`, `models` and the techniques return this type. `training` wraps it, for it has errors that a
//! program handles one by one, such as a training that diverged. A program decides by predicates:
//!
//! ```
//! use runtime::Error;
//! use tch::{Tensor, kind::FLOAT_CPU};
//!
//! let x = Tensor::zeros([2, 3], FLOAT_CPU);
//! let error = Error::from(x.f_matmul(&x).unwrap_err()).context("attention");
//! assert_eq!(error.to_string(), "attention: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)");
//! assert!(!error.is_out_of_memory());
//! ```
//!
//! An error that went through libtorch's engine, in a hand-written backward, comes back as [`Error::Torch`] with its message.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use tch::TchError;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a library over libtorch. Its message names the operation, the values, what was expected, and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// libtorch refused an operation. The message is libtorch's own, without its C++ stack.
    #[error("{0}")]
    Torch(String),
    /// An invalid argument or configuration, or a call that the current state does not allow.
    #[error("{0}")]
    Invalid(String),
    /// A model or an input that a technique does not support.
    #[error("{0}")]
    Unsupported(String),
    /// A device, library or operator that this machine or this build lacks.
    #[error("{what} is not available here: {reason}")]
    Unavailable {
        /// The request.
        what: String,
        /// Why it is missing, and the remedy.
        reason: String,
    },
    /// Work that was queued on a stream failed.
    #[error("work on the stream failed: {0}")]
    Stream(String),
    /// A file that is invalid or cannot be used.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem, and the remedy.
        reason: String,
    },
    /// A file could not be read or written.
    #[error("{}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// An operation over several processes failed, and its group is dead.
    #[error(transparent)]
    Collective(Box<crate::collectives::CollectiveError>),
    /// Another error, with where it happened.
    #[error("{message}")]
    Context {
        /// The message, which contains the cause's.
        message: String,
        /// The error.
        cause: Box<Self>,
    },
    /// An error of the caller's own closure or `Function`.
    #[error(transparent)]
    Other(#[from] Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Returns an [`Error::Invalid`] of an operation or a part.
    pub fn invalid(operation: impl Display, reason: impl Display) -> Self {
        Self::Invalid(format!("{operation}: {reason}"))
    }

    /// Returns an [`Error::File`].
    pub fn file(path: impl AsRef<Path>, reason: impl Display) -> Self {
        Self::File { path: path.as_ref().to_owned(), reason: reason.to_string() }
    }

    /// Returns an [`Error::Io`].
    pub fn io(path: impl AsRef<Path>, cause: std::io::Error) -> Self {
        Self::Io { path: path.as_ref().to_owned(), cause }
    }

    /// Returns this error with `context: ` before its message. Predicates answer as before.
    #[must_use]
    pub fn context(self, context: impl Display) -> Self {
        let message = format!("{context}: {self}");
        self.with_message(message)
    }

    /// Returns this error under another message, which should contain this one's. Predicates answer as before.
    #[must_use]
    pub fn with_message(self, message: impl Into<String>) -> Self {
        Self::Context { message: message.into(), cause: Box::new(self) }
    }

    /// Returns whether an allocation was refused: by a [`limit`](crate::memory::limit), or by a device or a system without memory.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Invalid(_) | Self::Unsupported(_) | Self::File { .. } | Self::Io { .. } => false,
            Self::Context { cause, .. } => cause.is_out_of_memory(),
            Self::Other(error) => {
                let first: &(dyn std::error::Error + 'static) = &**error;
                std::iter::successors(Some(first), |error| error.source())
                    .any(|error| is_refused_allocation(&error.to_string()))
            }
            other => is_refused_allocation(&other.to_string()),
        }
    }

    /// Returns whether an argument, a configuration or a model is invalid, so that the same call will fail again.
    pub fn is_invalid_argument(&self) -> bool {
        match self {
            Self::Invalid(_) | Self::Unsupported(_) => true,
            Self::Context { cause, .. } => cause.is_invalid_argument(),
            _ => false,
        }
    }
}

/// Recognizes a refused allocation by its words, because libtorch's errors are texts: of limits, of CUDA and of the counting allocator; of
/// libtorch's own allocator on the CPU; of C++.
fn is_refused_allocation(message: &str) -> bool {
    ["out of memory", "can't allocate memory", "std::bad_alloc"].iter().any(|words| message.contains(words))
}

impl From<TchError> for Error {
    fn from(error: TchError) -> Self {
        match error {
            TchError::Torch(message) => Self::Torch(strip_frames(&message).to_owned()),
            other => Self::Torch(other.to_string()),
        }
    }
}

/// Returns libtorch's message without the C++ stack that follows it.
pub(crate) fn strip_frames(message: &str) -> &str {
    let end = message.find("\nException raised from").unwrap_or(message.len());
    message[..end].trim_end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_stripped() {
        let message = "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)\nException raised from meta at \
                       LinearAlgebra.cpp:200 (most recent call first):\nframe #0: c10::Error";
        assert_eq!(strip_frames(message), "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)");
        assert_eq!(strip_frames("plain"), "plain");
    }

    #[test]
    fn an_error_of_tch_has_no_frames() {
        let a = tch::Tensor::zeros([2, 3], tch::kind::FLOAT_CPU);
        let error = Error::from(a.f_matmul(&a).unwrap_err());
        assert_eq!(error.to_string(), "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)");
    }
}
