//! Matrix products into memory that is already there.

use tch::{Kind, Tensor};

use super::call;
use crate::error::{Error, Result};

/// `out = a · b` for `out` `[m, n]`, `a` `[m, k]`, `b` `[k, n]`. No autograd: neither operand may require gradients
/// outside [`tch::no_grad`].
///
/// # Errors
/// [`Error::Invalid`] for an `out` of another shape, which libtorch would resize with only a warning; those of [`call`].
pub fn mm_out(out: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    check_out("mm_out", out, a, b)?;
    call("aten::mm", "out", &[a.into(), b.into()], &[("out", out.into())]).map(drop)
}

/// `out = beta · out + alpha · a · b`, shapes as in [`mm_out`]. With `beta` 0 what `out` holds is ignored, NaN included.
///
/// # Errors
/// As [`mm_out`].
pub fn addmm_(out: &Tensor, a: &Tensor, b: &Tensor, beta: f64, alpha: f64) -> Result<()> {
    check_out("addmm_", out, a, b)?;
    call(
        "aten::addmm_",
        "",
        &[out.into(), a.into(), b.into()],
        &[("beta", beta.into()), ("alpha", alpha.into())],
    )
    .map(drop)
}

/// `out = a · b` (`out += a · b` with `accumulate`) in fp32 for operands of bf16 or fp16, added up in fp32 and never rounded to
/// theirs. CUDA only: libtorch has it for no other device.
///
/// # Errors
/// As [`mm_out`].
pub(crate) fn mm_widened(out: &Tensor, a: &Tensor, b: &Tensor, accumulate: bool) -> Result<()> {
    check_out("mm_widened", out, a, b)?;
    let named = [("out", out.into())];
    if accumulate {
        let arguments = [out.into(), a.into(), b.into(), Kind::Float.into()];
        return call("aten::addmm", "dtype_out", &arguments, &named).map(drop);
    }
    call("aten::mm", "dtype_out", &[a.into(), b.into(), Kind::Float.into()], &named).map(drop)
}

fn check_out(operation: &'static str, out: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    let (out, a, b) = (out.size(), a.size(), b.size());
    match (out.as_slice(), a.as_slice(), b.as_slice()) {
        (&[m, n], &[rows, inner], &[depth, columns]) if m == rows && inner == depth && n == columns => Ok(()),
        _ => Err(Error::invalid(
            operation,
            format!("out {out:?} is not the shape of {a:?} · {b:?}; expected [m, n], [m, k], [k, n]"),
        )),
    }
}
