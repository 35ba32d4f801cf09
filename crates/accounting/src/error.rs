//! Errors of this crate.

use std::path::PathBuf;

/// An invalid or unanswerable question. Each message names the value, the expected values and the remedy.
///
/// Messages include their cause, so variants have no `source`: a chain would repeat it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A size that must be positive is zero.
    #[error("{what} is 0; give a number of at least 1")]
    Zero {
        /// The size's name.
        what: &'static str,
    },
    /// A result is too large for the integers it is counted in.
    #[error("{what}: {terms} does not fit in {bits} bits; give smaller sizes")]
    Overflow {
        /// The computed quantity.
        what: &'static str,
        /// Bits of the integer that was too small.
        bits: u32,
        /// The operands.
        terms: String,
    },
    /// A name that is not in a table.
    #[error("unknown {kind} `{given}`; known are: {known}")]
    UnknownName {
        /// The table, for example `dtype`.
        kind: &'static str,
        /// The name as given.
        given: String,
        /// All names of the table, separated by commas.
        known: String,
    },
    /// Sizes of a model that contradict each other.
    #[error("{what}; {remedy}")]
    Shape {
        /// The sizes, with their values.
        what: String,
        /// Sizes that would be valid.
        remedy: String,
    },
    /// A number outside its range.
    #[error("{what} is {given}, outside {range}; {remedy}")]
    OutOfRange {
        /// The number's name.
        what: &'static str,
        /// The number as given.
        given: f64,
        /// The range in words.
        range: &'static str,
        /// The remedy.
        remedy: &'static str,
    },
    /// A ZeRO stage that does not exist.
    #[error(
        "ZeRO stage {given} does not exist; stages are 0 (nothing is divided), 1 (optimizer state), \
         2 (and gradients), 3 (and parameters)"
    )]
    ZeroStage {
        /// The stage as given.
        given: u64,
    },
    /// A text that should be a number of bytes, parameters or tokens.
    #[error("cannot read `{given}` as {what}; {remedy}")]
    Quantity {
        /// The expected kind of number.
        what: &'static str,
        /// The text as given.
        given: String,
        /// An example.
        remedy: &'static str,
    },
    /// Not even the smallest case fits.
    #[error(
        "no {what} fits: the smallest needs {needed} and the device has {available}; use more devices, a smaller \
         model, a lower precision, more recomputation or a higher ZeRO stage"
    )]
    NothingFits {
        /// The searched size: `batch`, `sequence` or `model`.
        what: &'static str,
        /// Bytes of the smallest case, formatted.
        needed: String,
        /// Bytes of the device, formatted.
        available: String,
    },
    /// An activation plan that does not exist: no choice of the layers fits.
    #[error(
        "no plan for {layers} layers fits {available}: the least takes {needed_text} ({needed} bytes); give that \
         budget, fewer tokens, or a choice that holds less"
    )]
    NoPlanFits {
        /// Number of layers.
        layers: usize,
        /// The smallest budget that a plan fits, in bytes.
        needed: u64,
        /// The same, for people.
        needed_text: String,
        /// The budget as given, for people.
        available: String,
    },
    /// Layers that fit no method of offloading.
    #[error(
        "no offloading of {layers} layers fits {available} of the device{host}: the least takes {needed_text} ({needed} \
         bytes: {parts}); give that budget, fewer tokens or a lower precision"
    )]
    NoOffloadFits {
        /// Number of layers.
        layers: usize,
        /// The host's budget, if there was one, as a part of the sentence.
        host: String,
        /// The smallest budget that a plan fits, in bytes.
        needed: u64,
        /// The same, for people.
        needed_text: String,
        /// Its parts, largest first.
        parts: String,
        /// The budget as given, for people.
        available: String,
    },
    /// A configuration file that is missing, invalid or not supported.
    #[error(transparent)]
    Config(#[from] decoder::Error),
    /// A configuration with valid fields whose sizes contradict each other.
    #[error("{path}: {cause}")]
    ConfigShape {
        /// The path as given.
        path: PathBuf,
        /// The sizes.
        cause: Box<Error>,
    },
}

impl Error {
    /// Returns the error for a name that is not in `known`.
    pub(crate) fn unknown<'a>(
        kind: &'static str,
        given: &str,
        known: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        let known = known.into_iter().collect::<Vec<_>>().join(", ");
        Self::UnknownName { kind, given: given.into(), known }
    }
}
