//! Errors of adapters, their configuration and their files.

use std::path::PathBuf;

use crate::matches::nearest;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting outside its range.
    #[error("`{name}` is {found}; expected {expected}")]
    Option {
        /// The setting.
        name: &'static str,
        /// Its value.
        found: String,
        /// The expected values, in words.
        expected: &'static str,
    },
    /// Targets that match nothing.
    #[error(
        "{targets} matches none of the model's projections; they are {}. Name some of them, whole or by their last part",
        listed(names)
    )]
    NoTarget {
        /// The targets.
        targets: String,
        /// The projections that exist.
        names: Vec<String>,
    },
    /// An entry of a list, or a pattern, that matches nothing.
    #[error(
        "`{field}`: `{entry}` matches none of {among}; {} {}",
        nearest.as_ref().map_or_else(|| "they are".to_owned(), |name| format!("did you mean `{name}`? They are")),
        listed(names)
    )]
    NoMatch {
        /// The setting.
        field: &'static str,
        /// The entry.
        entry: String,
        /// The names that it is matched with.
        among: &'static str,
        /// The nearest name, if one is near.
        nearest: Option<String>,
        /// The names that exist.
        names: Vec<String>,
    },
    /// A target that is not a projection.
    #[error(
        "the target `{name}` is not a linear projection of this model, so it cannot be adapted; the projections are {}. Train \
         it whole by `modules_to_save`, or leave it out by `exclude_modules`",
        listed(names)
    )]
    NotProjection {
        /// The target.
        name: String,
        /// The projections that exist.
        names: Vec<String>,
    },
    /// A target inside an MLP that is recomputed.
    #[error(
        "the target `{name}` is inside the MLP `{mlp}`, which computes its products itself to recompute them in backward, so it has \
         no projection to adapt; name other target modules, such as {others}, or leave the MLP as it is"
    )]
    Recomputed {
        /// The target.
        name: String,
        /// The MLP.
        mlp: String,
        /// The projections outside it.
        others: String,
    },
    /// A module to save that the model lacks.
    #[error(
        "`modules_to_save`: the model has no module that ends with `{name}`; it has {}{}",
        listed(names),
        suggestion(name, names)
    )]
    NoModule {
        /// The requested name.
        name: String,
        /// The modules that exist.
        names: Vec<String>,
    },
    /// An invalid regular expression.
    #[error("the pattern `{pattern}`: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The problem.
        reason: String,
    },
    /// An unsupported setting that would change the computation.
    #[error("`{field}` is {found}, which is not supported; {remedy}")]
    Unsupported {
        /// The setting.
        field: String,
        /// Its value.
        found: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// An adapter whose tensors do not match this model and configuration.
    #[error("{from} does not fit this model: {}", problems(missing, unexpected, mismatched))]
    Adapter {
        /// Where it came from.
        from: String,
        /// Tensors that are missing.
        missing: Vec<String>,
        /// Tensors that the model does not have.
        unexpected: Vec<String>,
        /// Tensors of another shape, with both shapes.
        mismatched: Vec<String>,
    },
    /// A name that no adapter has.
    #[error("there is no adapter `{name}`; expected one of: {}", listed(known))]
    UnknownAdapter {
        /// The name.
        name: String,
        /// The existing names.
        known: Vec<String>,
    },
    /// An invalid name.
    #[error("an adapter cannot be called `{name}`: {reason}")]
    AdapterName {
        /// The name.
        name: String,
        /// Why.
        reason: &'static str,
    },
    /// An operation that is impossible in the current state.
    #[error("{0}")]
    State(String),
    /// Weights that would not be finite after a merge.
    #[error(
        "merging {adapters} into `{module}` gives values that are not finite; nothing was merged. Find out where the training \
         diverged, or delete the adapter"
    )]
    NotFinite {
        /// The projection.
        module: String,
        /// The adapters.
        adapters: String,
    },
    /// An invalid file.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// An error of the model.
    #[error(transparent)]
    Models(#[from] models::Error),
    /// An error of the runtime.
    #[error(transparent)]
    Runtime(#[from] runtime::Error),
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Runtime(error.into())
    }
}

/// Lists the first names, and the number of others.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 12;
    let shown = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => "none".to_owned(),
        count if count > SHOWN => format!("{shown} and {} more", count - SHOWN),
        _ => shown,
    }
}

/// The last part of a name that is near to an unknown one, as a question.
fn suggestion(unknown: &str, names: &[String]) -> String {
    let near = nearest(unknown, names.iter().filter_map(|name| name.rsplit('.').next()));
    near.map_or_else(String::new, |name| format!("; did you mean `{name}`?"))
}

fn problems(missing: &[String], unexpected: &[String], mismatched: &[String]) -> String {
    let lists = [("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched)];
    let named = lists.iter().filter(|(_, names)| !names.is_empty());
    let said: Vec<String> = named.map(|(title, names)| format!("{title} {}", listed(names))).collect();
    format!("{}; it belongs to another base model, or its configuration was changed later", said.join("; "))
}
