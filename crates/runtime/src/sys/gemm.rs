//! fp32 matrix products by the `gemm` crate, on the memory of tensors.

use tch::Tensor;

use super::tensor::bump_version;
use crate::error::{Error, Result};

/// `out = a·b`, or `out += a·b`, for fp32 CPU matrices of any strides; shapes, dtypes, layouts, and that the output
/// shares no memory with an operand, are checked by the caller.
pub(crate) fn gemm_f32(
    out: &mut Tensor,
    a: &Tensor,
    b: &Tensor,
    accumulate: bool,
    threads: usize,
) -> Result<()> {
    let (m, n, k) = (out.size()[0] as usize, out.size()[1] as usize, a.size()[1] as usize);
    let strides = |tensor: &Tensor| -> (isize, isize) {
        let stride = tensor.stride();
        (stride[0] as isize, stride[1] as isize)
    };
    let ((out_rs, out_cs), (a_rs, a_cs), (b_rs, b_cs)) = (strides(out), strides(a), strides(b));
    // Each element of the output has a place of its own: dense rows or dense columns, in windows of larger matrices too.
    let apart = match (m, n) {
        (_, 1) => m == 1 || out_rs >= 1,
        (1, _) => out_cs >= 1,
        _ => (out_cs == 1 && out_rs >= n as isize) || (out_rs == 1 && out_cs >= m as isize),
    };
    if !apart {
        let reason = format!("the output's strides {:?} are neither row- nor column-major", out.stride());
        return Err(Error::invalid("matrix product", reason));
    }
    let parallelism = if threads > 1 { gemm::Parallelism::Rayon(threads) } else { gemm::Parallelism::None };
    // SAFETY: the caller checked that all three are fp32 CPU matrices of shapes [m, n], [m, k] and [k, n], so that every
    // element reached by these sizes and strides lies in its tensor; the output's elements are distinct (dense rows or
    // columns, checked above) and apart from both operands' (checked by the caller); `out` is borrowed mutably.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.data_ptr().cast::<f32>(),
            out_cs,
            out_rs,
            accumulate,
            a.data_ptr().cast::<f32>().cast_const(),
            a_cs,
            a_rs,
            b.data_ptr().cast::<f32>().cast_const(),
            b_cs,
            b_rs,
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
    bump_version(out)
}
