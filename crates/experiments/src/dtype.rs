//! Names of dtypes in command lines and records.

use tch::Kind;

/// Returns the name of a floating dtype: fp32, bf16, fp16 or fp64.
pub(crate) fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::BFloat16 => "bf16",
        Kind::Half => "fp16",
        Kind::Double => "fp64",
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
