//! What a trace file can have wrong.

use std::path::PathBuf;

/// A trace that cannot be read, or in which there are no steps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// The file cannot be opened or read.
    #[error("cannot read the trace {path}: {cause}; give the path of a file that a trace was saved to")]
    Read {
        /// The path as given.
        path: PathBuf,
        /// What the operating system said.
        cause: std::io::Error,
    },
    /// The file ends in the middle.
    #[error(
        "the trace {path} ends too early, in line {line}: the program that wrote it was stopped, or the disk was full; \
         record it again"
    )]
    Truncated {
        /// The path as given.
        path: PathBuf,
        /// The last line, from 1.
        line: usize,
    },
    /// The file is something else.
    #[error(
        "{path} is no trace in Chrome's format, which is a JSON object with an array \"traceEvents\": {reason}; give a \
         file that runtime::profile::Trace::save wrote, unpacked if it was packed"
    )]
    Foreign {
        /// The path as given.
        path: PathBuf,
        /// What came instead.
        reason: String,
    },
    /// No range of the trace is a whole step.
    #[error(
        "the trace has {operators} operators but no range named \"step\"; record whole steps, each within \
         runtime::profile::range(\"step\")"
    )]
    NoSteps {
        /// Operators in the trace.
        operators: usize,
    },
}
