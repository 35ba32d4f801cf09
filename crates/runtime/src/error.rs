//! Errors of this crate.

use tch::TchError;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the runtime.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// libtorch refused an operation. The message is libtorch's own, without its C++ stack.
    #[error("{0}")]
    Torch(String),
    /// An invalid argument.
    #[error("{operation}: {reason}")]
    Invalid {
        /// The operation.
        operation: &'static str,
        /// What was given, what was expected, and the remedy.
        reason: String,
    },
    /// Something that this machine or this build does not have.
    #[error("{what} is not available here: {reason}")]
    Unavailable {
        /// What was requested.
        what: String,
        /// Why it is missing, and the remedy.
        reason: String,
    },
    /// Work that was queued on a stream failed.
    #[error("work on the stream failed: {0}")]
    Stream(String),
    /// A file could not be read or written.
    #[error("{path}: {cause}")]
    Io {
        /// The file.
        path: std::path::PathBuf,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// An operation over several processes failed, and its group is dead.
    #[error(transparent)]
    Collective(Box<crate::collectives::CollectiveError>),
    /// An error of the caller's own closure or `Function`.
    #[error(transparent)]
    Other(#[from] Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Creates an [`Error::Invalid`].
    pub fn invalid(operation: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { operation, reason: reason.into() }
    }
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
