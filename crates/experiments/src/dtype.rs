//! Names of dtypes in command lines and records.

use kernels::nf4::Scales;
use tch::Kind;

/// Returns the name of a dtype of weights: fp32, bf16, fp16, fp64 or nf4.
pub(crate) fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::BFloat16 => "bf16",
        Kind::Half => "fp16",
        Kind::Double => "fp64",
        kind if Scales::of(kind).is_some() => "nf4",
        _ => "fp32",
    }
}

/// Returns the dtype of a name.
///
/// # Errors
/// Another name than fp32, bf16 and fp16.
pub(crate) fn parse(text: &str) -> Result<Kind, String> {
    match text {
        "fp32" => Ok(Kind::Float),
        "bf16" => Ok(Kind::BFloat16),
        "fp16" => Ok(Kind::Half),
        _ => Err(format!("no dtype `{text}`: expected fp32, bf16 or fp16")),
    }
}

/// Returns the dtype of a model's weights: those of [`parse`], and nf4.
///
/// # Errors
/// Another name.
pub(crate) fn parse_weights(text: &str) -> Result<Kind, String> {
    match text {
        "nf4" => Ok(Scales::Nested.kind()),
        other => parse(other).map_err(|error| format!("{error}, or nf4 for the weights of a model")),
    }
}
