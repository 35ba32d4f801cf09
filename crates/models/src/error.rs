//! Errors of models and their files.

use std::path::PathBuf;

use tch::{Device, Kind};

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor of the wrong shape.
    #[error("{operation}: `{name}` has shape {found:?}; expected {expected}")]
    Shape {
        /// The operation.
        operation: &'static str,
        /// The tensor's name.
        name: &'static str,
        /// Its shape.
        found: Vec<i64>,
        /// The expected shape, in words.
        expected: String,
    },
    /// An invalid configuration.
    #[error("{what}: {reason}")]
    Config {
        /// The model or part.
        what: &'static str,
        /// The problem, and the remedy.
        reason: String,
    },
    /// A token outside the model's vocabulary.
    #[error(
        "token {token} is outside the model's vocabulary of {vocabulary} (0 to {}); the tokenizer and the model do not belong \
         together, or the model needs a larger `vocabulary`", vocabulary - 1
    )]
    Token {
        /// The smallest or largest token found.
        token: i64,
        /// The size of the vocabulary.
        vocabulary: i64,
    },
    /// Logits that no token can be chosen from.
    #[error(
        "generation: prompt {prompt}: the largest logit is {logit}; {}",
        weight.as_ref().map_or_else(
            || "the dtype of the weights is too narrow for the model".to_owned(),
            |name| format!("`{name}` has an infinity or a NaN: the model's files are broken"),
        )
    )]
    Logits {
        /// The number of the prompt.
        prompt: usize,
        /// Its largest logit, infinite or NaN.
        logit: f64,
        /// The first weight that has an infinity or a NaN.
        weight: Option<String>,
    },
    /// An invalid pattern for parameter names.
    #[error("the pattern `{pattern}` for parameter names: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// Why.
        reason: String,
    },
    /// A state dict that does not match the model.
    #[error("{from} does not fit the model: {}", problems(missing, unexpected, mismatched))]
    State {
        /// Where it came from, for example a path.
        from: String,
        /// Names that only the model has.
        missing: Vec<String>,
        /// Names that only the state dict has.
        unexpected: Vec<String>,
        /// Name, shape and dtype found, and what was expected.
        mismatched: Vec<String>,
    },
    /// An invalid, missing or unreadable file.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// A repository of the hub that cannot be fetched.
    #[error("`{name}`: {reason}")]
    Hub {
        /// The repository.
        name: String,
        /// Why, and the remedy.
        reason: String,
    },
    /// A tensor on the wrong device or of the wrong dtype.
    #[error("{operation}: `{name}` is {found_kind:?} on {found_device:?}; expected {expected}")]
    Placement {
        /// The operation.
        operation: &'static str,
        /// The tensor's name.
        name: &'static str,
        /// Its dtype.
        found_kind: Kind,
        /// Its device.
        found_device: Device,
        /// The expected value.
        expected: String,
    },
    /// An error of the runtime.
    #[error(transparent)]
    Runtime(runtime::Error),
}

impl From<runtime::Error> for Error {
    /// Unwraps an error of this crate that went through a closure of the runtime.
    fn from(error: runtime::Error) -> Self {
        match error {
            runtime::Error::Other(error) => match error.downcast::<Self>() {
                Ok(own) => *own,
                Err(other) => Self::Runtime(runtime::Error::Other(other)),
            },
            other => Self::Runtime(other),
        }
    }
}

impl From<Error> for runtime::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Runtime(error) => error,
            other => Self::Other(Box::new(other)),
        }
    }
}

impl From<decoder::Error> for Error {
    fn from(error: decoder::Error) -> Self {
        match error {
            decoder::Error::Config { what, reason } => Self::Config { what, reason },
            decoder::Error::File { path, reason } => Self::File { path, reason },
            other => Self::Config { what: "decoder", reason: other.to_string() },
        }
    }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Runtime(error.into())
    }
}

/// Formats the three lists, at most eight names of each.
fn problems(missing: &[String], unexpected: &[String], mismatched: &[String]) -> String {
    let list = |title: &str, names: &[String]| {
        let more = names.len().saturating_sub(8);
        let shown = names.iter().take(8).cloned().collect::<Vec<_>>().join(", ");
        match (names.is_empty(), more) {
            (true, _) => None,
            (false, 0) => Some(format!("{title} {shown}")),
            (false, more) => Some(format!("{title} {shown} and {more} more")),
        }
    };
    let lists =
        [list("missing", missing), list("unexpected", unexpected), list("of another shape", mismatched)];
    lists.into_iter().flatten().collect::<Vec<_>>().join("; ")
}
