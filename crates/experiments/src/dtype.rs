//! Names of dtypes in command lines and records.

use kernels::nf4::Scales;
use kernels::quantized::blocks;
use tch::Kind;

/// Returns the name of a dtype of weights: fp32, bf16, fp16, fp64, nf4 or gguf.
pub(crate) fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::BFloat16 => "bf16",
        Kind::Half => "fp16",
        Kind::Double => "fp64",
        blocks::KIND => "gguf",
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

/// Returns the dtype of a frozen base: those of [`parse_weights`], and gguf for the blocks of a GGUF file.
///
/// # Errors
/// Another name.
pub(crate) fn parse_base(text: &str) -> Result<Kind, String> {
    match text {
        "gguf" => Ok(blocks::KIND),
        other => parse_weights(other).map_err(|error| format!("{error}, or gguf for those of a GGUF file")),
    }
}
