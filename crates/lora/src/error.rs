//! What can be wrong with adapters, their configuration and their files.

use std::path::PathBuf;

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting outside its range.
    #[error("`{name}` is {found}; expected {expected}")]
    Option {
        /// Which one.
        name: &'static str,
        /// Its value.
        found: String,
        /// What was expected, in words.
        expected: &'static str,
    },
    /// Targets that match nothing.
    #[error(
        "{targets} matches none of the model's projections; they are {}. Name some of them, whole or by their last part",
        listed(names)
    )]
    NoTarget {
        /// What was asked for.
        targets: String,
        /// The projections that exist.
        names: Vec<String>,
    },
    /// A target that is no projection.
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
        /// Projections that exist.
        others: String,
    },
    /// Modules to save that the model lacks.
    #[error("`modules_to_save`: the model has no module that ends with `{name}`; it has {}", listed(names))]
    NoModule {
        /// What was asked for.
        name: String,
        /// The modules that exist.
        names: Vec<String>,
    },
    /// A pattern that is no regular expression.
    #[error("the pattern `{pattern}`: {reason}")]
    Pattern {
        /// As it was given.
        pattern: String,
        /// Why it cannot be used.
        reason: String,
    },
    /// A setting that would change what is computed, and that is not supported.
    #[error("`{field}` is {found}, which is not supported; {remedy}")]
    Unsupported {
        /// Which setting.
        field: String,
        /// Its value.
        found: String,
        /// What to do.
        remedy: &'static str,
    },
    /// An adapter whose tensors are not those of this model under its configuration.
    #[error("{from} does not fit this model: {}", problems(missing, unexpected, mismatched))]
    Adapter {
        /// Where it came from.
        from: String,
        /// Tensors that it lacks.
        missing: Vec<String>,
        /// Tensors that have no place in the model.
        unexpected: Vec<String>,
        /// Tensors of another shape, with both shapes.
        mismatched: Vec<String>,
    },
    /// A name that no adapter has.
    #[error("there is no adapter `{name}`; there are: {}", listed(known))]
    UnknownAdapter {
        /// The name.
        name: String,
        /// Those that exist.
        known: Vec<String>,
    },
    /// A name that cannot be given.
    #[error("an adapter cannot be called `{name}`: {reason}")]
    AdapterName {
        /// The name.
        name: String,
        /// Why.
        reason: &'static str,
    },
    /// Something that cannot be done as things stand.
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
    /// A file that is not what it should be.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The model refused.
    #[error(transparent)]
    Models(#[from] models::Error),
    /// The runtime refused.
    #[error(transparent)]
    Runtime(#[from] runtime::Error),
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Runtime(error.into())
    }
}

/// The first names, and how many more there are.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 12;
    let shown = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => "none".to_owned(),
        count if count > SHOWN => format!("{shown} and {} more", count - SHOWN),
        _ => shown,
    }
}

fn problems(missing: &[String], unexpected: &[String], mismatched: &[String]) -> String {
    let lists = [("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched)];
    let named = lists.iter().filter(|(_, names)| !names.is_empty());
    let said: Vec<String> = named.map(|(title, names)| format!("{title} {}", listed(names))).collect();
    format!(
        "{}; it belongs to another base model, or its configuration was changed after it was written",
        said.join("; ")
    )
}
