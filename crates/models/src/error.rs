//! What can be wrong with a model's arguments and files.

use std::path::PathBuf;

use tch::{Device, Kind};

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor of another shape than the operation needs.
    #[error("{operation}: `{name}` has shape {found:?}; expected {expected}")]
    Shape {
        /// Where.
        operation: &'static str,
        /// Which tensor.
        name: &'static str,
        /// Its shape.
        found: Vec<i64>,
        /// What was expected, in words.
        expected: String,
    },
    /// A configuration that makes no model.
    #[error("{what}: {reason}")]
    Config {
        /// The model or part.
        what: &'static str,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// Tokens that the model does not know.
    #[error(
        "token {token} is outside the model's vocabulary of {vocabulary} (0 to {}); the tokenizer and the model do not belong \
         together, or the model needs a larger `vocabulary`", vocabulary - 1
    )]
    Token {
        /// The smallest or largest token found.
        token: i64,
        /// How many the model knows.
        vocabulary: i64,
    },
    /// A pattern for names that cannot be used.
    #[error("the pattern `{pattern}` for parameter names: {reason}")]
    Pattern {
        /// As it was given.
        pattern: String,
        /// Why.
        reason: String,
    },
    /// A state dict that does not fit the model.
    #[error("{from} does not fit the model: {}", problems(missing, unexpected, mismatched))]
    State {
        /// Where it came from.
        from: String,
        /// Names that the model has and the state dict lacks.
        missing: Vec<String>,
        /// Names that the model lacks.
        unexpected: Vec<String>,
        /// Name, shape and dtype found, and what was expected.
        mismatched: Vec<String>,
    },
    /// A file that is not what it should be.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A repository of the hub that cannot be had.
    #[error("`{name}`: {reason}")]
    Hub {
        /// The repository.
        name: String,
        /// Why, and what to do.
        reason: String,
    },
    /// A tensor on another device, or of another dtype, than the model.
    #[error("{operation}: `{name}` is {found_kind:?} on {found_device:?}; expected {expected}")]
    Placement {
        /// Where.
        operation: &'static str,
        /// Which tensor.
        name: &'static str,
        /// Its dtype.
        found_kind: Kind,
        /// Its device.
        found_device: Device,
        /// What was expected.
        expected: String,
    },
    /// The runtime refused.
    #[error(transparent)]
    Runtime(runtime::Error),
}

impl From<runtime::Error> for Error {
    /// An error of a model that went through a closure of the runtime is itself again.
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

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Runtime(error.into())
    }
}

/// The three lists, each cut after eight names.
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
