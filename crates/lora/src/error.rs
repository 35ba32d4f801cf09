//! Messages of adapters, their configuration and their files. The type is the runtime's.

use std::fmt::Display;

pub use runtime::{Error, Result};

use crate::matches::nearest;

/// A setting outside its range.
pub(crate) fn option(name: &str, value: impl Display, expected: &str) -> Error {
    Error::Invalid(format!("`{name}` is {value}; expected {expected}"))
}

/// A setting that would change the computation, and is not supported.
pub(crate) fn unsupported(field: &str, value: impl Display, remedy: &str) -> Error {
    Error::Unsupported(format!("`{field}` is {value}, which is not supported; {remedy}"))
}

/// Targets that match none of the projections with these names.
pub(crate) fn no_target(targets: &str, names: &[String]) -> Error {
    Error::Invalid(format!(
        "{targets} matches none of the model's projections; they are {}. Name some of them, whole or by their last part",
        listed(names)
    ))
}

/// An entry of a list, or a pattern, that matches none of `names`.
pub(crate) fn no_match(
    field: &str,
    entry: &str,
    among: &str,
    nearest: Option<&str>,
    names: &[String],
) -> Error {
    let nearest =
        nearest.map_or_else(|| "they are".to_owned(), |name| format!("did you mean `{name}`? They are"));
    Error::Invalid(format!("`{field}`: `{entry}` matches none of {among}; {nearest} {}", listed(names)))
}

/// An adapter from `source` whose tensors do not match this model and configuration: names that it lacks, names that only it has, and
/// tensors of another shape, with both shapes.
pub(crate) fn foreign_adapter(
    source: impl Display,
    missing: &[String],
    unexpected: &[String],
    mismatched: &[String],
) -> Error {
    let lists = [("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched)];
    let named = lists.iter().filter(|(_, names)| !names.is_empty());
    let named: Vec<String> = named.map(|(title, names)| format!("{title} {}", listed(names))).collect();
    Error::Invalid(format!(
        "{source} does not fit this model: {}; it belongs to another base model, or its configuration was changed later",
        named.join("; ")
    ))
}

/// Lists the first names, and the number of others.
pub(crate) fn listed(names: &[String]) -> String {
    const SHOWN: usize = 12;
    let shown = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => "none".to_owned(),
        count if count > SHOWN => format!("{shown} and {} more", count - SHOWN),
        _ => shown,
    }
}

/// The last part of a name that is near to an unknown one, as a question.
pub(crate) fn suggestion(unknown: &str, names: &[String]) -> String {
    let near = nearest(unknown, names.iter().filter_map(|name| name.rsplit('.').next()));
    near.map_or_else(String::new, |name| format!("; did you mean `{name}`?"))
}
