//! Messages of the loss scaler. The type is that of a training.

use std::fmt::Display;

pub use training::{Error, Result};

/// An error of a loss scaler: an option outside its range, a call out of order, or another scaler's state.
pub(crate) fn refused(reason: impl Display) -> Error {
    Error::config("gradient scaler", reason)
}

/// An option outside its range.
pub(crate) fn option(name: &str, value: f64, expected: &str) -> Error {
    refused(format!("`{name}` is {value}; expected {expected}"))
}

/// The state of another scaler.
pub(crate) fn foreign_state(state: &serde_json::Value, scaler: &str, reason: impl Display) -> Error {
    refused(format!(
        "the state {state} does not load into a {scaler}: {reason}; use the scaler that the run was saved with"
    ))
}
