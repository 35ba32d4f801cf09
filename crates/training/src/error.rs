//! Errors of a training: those that a program handles one by one, and [`runtime::Error`] for all others.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use models::error::listed;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
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
    /// Too many steps in a row overflowed: no scale of the loss helps.
    #[error("{0}")]
    Overflowed(String),
    /// No activation plan fits the budget.
    #[error(transparent)]
    Plan(#[from] accounting::Error),
    /// An error of the data.
    #[error(transparent)]
    Data(#[from] dataloading::Error),
    /// An invalid trace, or one without steps.
    #[error(transparent)]
    Profile(#[from] trace::ProfileError),
    /// Every other error.
    #[error(transparent)]
    Runtime(#[from] runtime::Error),
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
    /// Returns an error of an invalid argument or configuration: the part, and the value, the expected values, and the remedy.
    pub fn config(part: impl Display, reason: impl Display) -> Self {
        Self::Runtime(runtime::Error::invalid(part, reason))
    }

    /// Returns an error of an invalid tensor.
    pub(crate) fn tensor(operation: &str, name: &str, reason: impl Display) -> Self {
        Self::config(operation, format!("`{name}` {reason}"))
    }

    /// Returns an error of tensors from a source that do not match their targets, with the names that only the targets have, those that
    /// only the source has, and those of another shape or dtype.
    pub(crate) fn state(
        source: &str,
        targets: &str,
        missing: &[String],
        unexpected: &[String],
        mismatched: &[String],
    ) -> Self {
        let names = listed([("missing", missing), ("unexpected", unexpected), ("different", mismatched)]);
        Self::Runtime(runtime::Error::Invalid(format!("{source} does not fit {targets}: {names}")))
    }

    /// Returns an error of an invalid file.
    pub fn file(path: impl AsRef<Path>, reason: impl Display) -> Self {
        Self::Runtime(runtime::Error::file(path, reason))
    }

    /// Returns an error of a file that could not be read or written.
    pub fn io(path: impl AsRef<Path>, cause: std::io::Error) -> Self {
        Self::Runtime(runtime::Error::io(path, cause))
    }

    /// As [`runtime::Error::is_out_of_memory`].
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Runtime(error) => error.is_out_of_memory(),
            Self::Interrupted { cause, .. } => cause.is_out_of_memory(),
            _ => false,
        }
    }

    /// As [`runtime::Error::is_invalid_argument`].
    pub fn is_invalid_argument(&self) -> bool {
        matches!(self, Self::Runtime(error) if error.is_invalid_argument())
    }
}
