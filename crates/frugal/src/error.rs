//! Errors of this crate.

use std::path::PathBuf;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that cannot be read or written, or holds something else.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem, its place, and the remedy.
        reason: String,
    },
    /// A configuration that is not TOML, or has a key or a value that means nothing.
    #[error("{0}")]
    Toml(String),
    /// A value outside its range.
    #[error("`{key}` is {found}; expected {expected}")]
    Value {
        /// The key, with its section.
        key: &'static str,
        /// The value.
        found: String,
        /// The expected values.
        expected: &'static str,
    },
    /// Two techniques that cannot be combined.
    #[error("{first} and {second} cannot be combined: {why}; {remedy}")]
    Conflict {
        /// A technique, as the configuration says it.
        first: String,
        /// The other one.
        second: String,
        /// The reason.
        why: &'static str,
        /// A combination that works.
        remedy: &'static str,
    },
    /// A teacher or a reference that does not fit the model that learns.
    #[error("{other} cannot be the {role} of {model}: {reason}")]
    OtherModel {
        /// What the other model is for.
        role: &'static str,
        /// The name of the model that learns.
        model: String,
        /// The other model's name.
        other: String,
        /// What does not fit.
        reason: String,
    },
    /// A budget that the process is beyond before its work begins.
    #[error(
        "a budget of {budget} is below the {least} that the program itself needs; give a larger --budget"
    )]
    Budget {
        /// The budget.
        budget: String,
        /// The least budget beyond what the process takes.
        least: String,
    },
    /// A rate that came out as none.
    #[error("the rate of a product or a copy could not be measured; run again on an idle machine")]
    NotMeasured,
    /// A generated number that is no token id.
    #[error("the model generated a token id that does not fit 32 bits")]
    NotAToken,
    /// Data or a tokenizer.
    #[error(transparent)]
    Data(#[from] dataloading::Error),
    /// A model or a technique.
    #[error(transparent)]
    Runtime(#[from] runtime::Error),
    /// The training loop.
    #[error(transparent)]
    Training(#[from] training::Error),
    /// A prediction of bytes.
    #[error(transparent)]
    Accounting(#[from] accounting::Error),
}

impl Error {
    /// As [`runtime::Error::is_out_of_memory`].
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Runtime(error) | Self::Data(dataloading::Error::Runtime(error)) => error.is_out_of_memory(),
            Self::Training(error) => error.is_out_of_memory(),
            _ => false,
        }
    }
}
