//! Messages that several parts of this crate have in common. The type is the runtime's.

use std::fmt::Display;

pub use runtime::{Error, Result};
use tch::{Device, Kind};

/// A tensor of the wrong shape.
pub(crate) fn wrong_shape(
    operation: &str,
    name: &str,
    shape: impl AsRef<[i64]>,
    expected: impl Display,
) -> Error {
    Error::invalid(operation, format!("`{name}` has shape {:?}; expected {expected}", shape.as_ref()))
}

/// A tensor on the wrong device or of the wrong dtype.
pub(crate) fn wrong_placement(
    operation: &str,
    name: &str,
    (kind, device): (Kind, Device),
    expected: impl Display,
) -> Error {
    Error::invalid(operation, format!("`{name}` is {kind:?} on {device:?}; expected {expected}"))
}

/// A token outside the model's vocabulary.
pub(crate) fn unknown_token(token: i64, vocabulary: i64) -> Error {
    Error::Invalid(format!(
        "token {token} is outside the model's vocabulary of {vocabulary} (0 to {}); the tokenizer and the model do not belong \
         together, or the model needs a larger `vocabulary`",
        vocabulary - 1
    ))
}

/// An invalid configuration of a decoder.
pub(crate) fn decoder(error: decoder::Error) -> Error {
    match error {
        decoder::Error::File { path, reason } => Error::File { path, reason },
        decoder::Error::Config { what, reason } => Error::invalid(what, reason),
        other => Error::invalid("decoder", other),
    }
}

/// Lists the names under each title, at most eight of each.
pub fn listed<'a>(lists: impl IntoIterator<Item = (&'a str, &'a [String])>) -> String {
    let list = |(title, names): (&str, &[String])| {
        let shown = names.iter().take(8).map(String::as_str).collect::<Vec<_>>().join(", ");
        match names.len() {
            0 => None,
            1..=8 => Some(format!("{title} {shown}")),
            count => Some(format!("{title} {shown} and {} more", count - 8)),
        }
    };
    lists.into_iter().filter_map(list).collect::<Vec<_>>().join("; ")
}
