//! What can be wrong with a training run.

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
        /// Which part.
        what: &'static str,
        /// What came, what was expected, and what to do.
        reason: String,
    },
    /// A tensor that an operation cannot take.
    #[error("{operation}: `{name}` {reason}")]
    Tensor {
        /// The operation.
        operation: &'static str,
        /// The tensor's name.
        name: String,
        /// What came and what was expected.
        reason: String,
    },
    /// Named tensors that do not fit where they should go.
    #[error("{from} does not fit {into}: {}", problems(missing, unexpected, mismatched))]
    State {
        /// Where they came from.
        from: String,
        /// Where they should go.
        into: &'static str,
        /// Names that are needed and not there.
        missing: Vec<String>,
        /// Names that are there and not needed.
        unexpected: Vec<String>,
        /// Name, shape and dtype found, and what was expected.
        mismatched: Vec<String>,
    },
    /// A file of a checkpoint that is not what was written.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// No checkpoint of a folder can be used.
    #[error(
        "no checkpoint in {} can be used: {}; start again in an empty folder, or put back a copy of one of them",
        folder.display(), refused.join("; ")
    )]
    NoCheckpoint {
        /// The folder.
        folder: PathBuf,
        /// Why each was refused, the newest first.
        refused: Vec<String>,
    },
    /// A checkpoint could not be written.
    #[error("the checkpoint of step {step} was not written: {}: {cause}; {remedy}; the earlier ones are intact", path.display())]
    Save {
        /// The step.
        step: u64,
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        cause: std::io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// Another process writes checkpoints into the folder.
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
        /// What the operating system said.
        cause: std::io::Error,
    },
    /// The loss left the region where training makes sense.
    #[error(
        "training diverged at step {step}: {reason}; try a lower learning rate, a longer warm-up, or a smaller gradient norm to clip to"
    )]
    Diverged {
        /// The step.
        step: u64,
        /// The losses seen.
        reason: String,
    },
    /// No plan of activations fits its budget.
    #[error(transparent)]
    Plan(#[from] accounting::Error),
    /// The data refused.
    #[error(transparent)]
    Data(#[from] dataloading::Error),
    /// The model refused.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// A trace that cannot be read, or has no steps.
    #[error(transparent)]
    Profile(#[from] crate::profile::ProfileError),
    /// The runtime refused.
    #[error(transparent)]
    Runtime(#[from] runtime::Error),
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

/// The lists, each cut after eight names.
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
