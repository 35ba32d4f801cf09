//! Matrix products with fp32 accumulators.

use runtime::Result;
use runtime::ops::{Value, call};
use tch::{Kind, Tensor};

/// `out = a · b` (`out += a · b` with `accumulate`) in fp32 for operands of bf16 or fp16, accumulated in fp32 without rounding to
/// their dtype. CUDA only.
///
/// # Errors
/// Errors of [`call`].
pub(crate) fn mm_widened(out: &Tensor, a: &Tensor, b: &Tensor, accumulate: bool) -> Result<()> {
    let named = [("out", out.into())];
    if accumulate {
        let arguments = [out.into(), a.into(), b.into(), Kind::Float.into()];
        return call("aten::addmm", "dtype_out", &arguments, &named).map(drop);
    }
    call("aten::mm", "dtype_out", &[a.into(), b.into(), Kind::Float.into()], &named).map(drop)
}

/// `out = a · b` (`out += a · b` with `accumulate`), computed in fp32 and rounded once, for operands and an output of any dtype.
///
/// # Errors
/// Errors of libtorch.
pub(crate) fn mm_cast(out: &mut Tensor, a: &Tensor, b: &Tensor, accumulate: bool) -> Result<()> {
    let (a, b) = (a.f_to_kind(Kind::Float)?, b.f_to_kind(Kind::Float)?);
    let product = if accumulate { out.f_to_kind(Kind::Float)?.f_addmm(&a, &b)? } else { a.f_mm(&b)? };
    out.f_copy_(&product)?;
    Ok(())
}

/// `out = factor · a · b` in one launch, for operands and an output of one dtype. For GPUs: on a CPU,
/// [`crate::matmul`] chooses the kernel.
///
/// # Errors
/// Errors of [`call`].
pub(crate) fn mm_scaled(out: &Tensor, a: &Tensor, b: &Tensor, factor: f64) -> Result<()> {
    // With beta = 0, `out` is not read.
    let named = [("beta", Value::Int(0)), ("alpha", Value::Double(factor)), ("out", out.into())];
    call("aten::addmm", "out", &[out.into(), a.into(), b.into()], &named).map(drop)
}
