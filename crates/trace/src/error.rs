//! Errors of trace files.

use std::path::PathBuf;

/// A trace that cannot be read, or that has no steps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// The file cannot be opened or read.
    #[error("cannot read the trace {path}: {cause}; give the path of a file that a trace was saved to")]
    Read {
        /// The path.
        path: PathBuf,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// The file is truncated.
    #[error(
        "the trace {path} ends too early, in line {line}: the program that wrote it was stopped, or the disk was full; \
         record it again"
    )]
    Truncated {
        /// The path.
        path: PathBuf,
        /// The last line, from 1.
        line: usize,
    },
    /// The file is not a trace.
    #[error(
        "{path} is no trace in Chrome's format, which is a JSON object with an array \"traceEvents\": {reason}; give a \
         file that runtime::profile::Trace::save wrote, unpacked if it was packed"
    )]
    Foreign {
        /// The path.
        path: PathBuf,
        /// The value that was there.
        reason: String,
    },
    /// No range of the trace is a complete step.
    #[error(
        "the trace has {operators} operators but no range named \"step\"; record whole steps, each within \
         runtime::profile::range(\"step\")"
    )]
    NoSteps {
        /// Operators in the trace.
        operators: usize,
    },
}
