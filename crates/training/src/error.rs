//! Errors of a training.

use std::path::PathBuf;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting outside its range.
    #[error("{what}: {reason}")]
    Config {
        /// The part of the training.
        what: &'static str,
        /// The value, the expected values, and the remedy.
        reason: String,
    },
    /// An invalid tensor.
    #[error("{operation}: `{name}` {reason}")]
    Tensor {
        /// The operation.
        operation: &'static str,
        /// The tensor's name.
        name: String,
        /// The problem, and the expected value.
        reason: String,
    },
    /// Named tensors that do not match their targets.
    #[error("{from} does not fit {into}: {}", problems(missing, unexpected, mismatched))]
    State {
        /// Where they came from.
        from: String,
        /// The targets.
        into: &'static str,
        /// Names that only the targets have.
        missing: Vec<String>,
        /// Names that only the source has.
        unexpected: Vec<String>,
        /// Name, shape and dtype found, and what was expected.
        mismatched: Vec<String>,
    },
    /// A file of a checkpoint that is invalid.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// No usable checkpoint in a folder.
    #[error(
        "no checkpoint in {} can be used: {}; start again in an empty folder, or put back a copy of one of them",
        folder.display(), refused.join("; ")
    )]
    NoCheckpoint {
        /// The folder.
        folder: PathBuf,
        /// Why each was refused, newest first.
        refused: Vec<String>,
    },
    /// A checkpoint could not be written.
    #[error(
        "the checkpoint of step {step} was not written: {}: {cause}; {remedy}; {}",
        path.display(), if *has_earlier { "the earlier ones are intact" } else { "there is no earlier one" }
    )]
    Save {
        /// The step.
        step: u64,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's error.
        cause: std::io::Error,
        /// The remedy.
        remedy: &'static str,
        /// Whether the folder has a checkpoint.
        has_earlier: bool,
    },
    /// Another process writes checkpoints to the folder.
    #[error(
        "{} is in use: another training writes its checkpoints there; wait for its end, or give another folder",
        folder.display()
    )]
    Locked {
        /// The folder.
        folder: PathBuf,
    },
    /// A file could not be read or written.
    #[error("{}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// The training diverged.
    #[error(
        "training diverged at step {step}: {reason}; try a lower learning rate, a longer warm-up, or a smaller gradient norm to clip to"
    )]
    Diverged {
        /// The step.
        step: u64,
        /// The losses seen.
        reason: String,
    },
    /// A loss is not finite because a weight is not: no later one will be.
    #[error(
        "{what} is {loss}, because `{weight}` has an infinity or a NaN; look for it in the model's files, or in the checkpoint that was \
         resumed from"
    )]
    NonFiniteWeight {
        /// The loss, with its step.
        what: String,
        /// Its value.
        loss: f64,
        /// The first of the model's tensors that has an infinity or a NaN.
        weight: String,
    },
    /// A step failed and could not be undone, for the most part because the optimizer had updated some of the weights; or a step could
    /// be loaded from its checkpoint only in part.
    #[error("step {step} failed and could not be undone: {cause}; resume from the last checkpoint")]
    Interrupted {
        /// The step, from 1.
        step: u64,
        /// Why it failed.
        cause: Box<Self>,
    },
    /// No activation plan fits the budget.
    #[error(transparent)]
    Plan(#[from] accounting::Error),
    /// An error of the data.
    #[error(transparent)]
    Data(#[from] dataloading::Error),
    /// An error of the model.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// An invalid trace, or one without steps.
    #[error(transparent)]
    Profile(#[from] trace::ProfileError),
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

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Runtime(error.into())
    }
}

impl Error {
    pub(crate) fn config(what: &'static str, reason: impl Into<String>) -> Self {
        Self::Config { what, reason: reason.into() }
    }

    pub(crate) fn file(path: &std::path::Path, reason: impl Into<String>) -> Self {
        Self::File { path: path.to_owned(), reason: reason.into() }
    }
}

/// Formats the lists, at most eight names of each.
fn problems(missing: &[String], unexpected: &[String], mismatched: &[String]) -> String {
    let of = |title: &str, names: &[String]| {
        let more = match names.len().saturating_sub(8) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let shown = names.iter().take(8).map(String::as_str).collect::<Vec<_>>().join(", ");
        (!names.is_empty()).then(|| format!("{title} {shown}{more}"))
    };
    let lists = [of("missing", missing), of("unexpected", unexpected), of("different", mismatched)];
    lists.into_iter().flatten().collect::<Vec<_>>().join("; ")
}
