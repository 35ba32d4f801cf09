//! Matrix products with fp32 accumulators.

use tch::{Kind, Tensor};

use super::call;
use crate::error::Result;

/// `out = a · b` (`out += a · b` with `accumulate`) in fp32 for operands of bf16 or fp16, accumulated in fp32 without rounding to
/// their dtype. CUDA only.
///
/// # Errors
/// Those of [`call`].
pub(crate) fn mm_widened(out: &Tensor, a: &Tensor, b: &Tensor, accumulate: bool) -> Result<()> {
    let named = [("out", out.into())];
    if accumulate {
        let arguments = [out.into(), a.into(), b.into(), Kind::Float.into()];
        return call("aten::addmm", "dtype_out", &arguments, &named).map(drop);
    }
    call("aten::mm", "dtype_out", &[a.into(), b.into(), Kind::Float.into()], &named).map(drop)
}
