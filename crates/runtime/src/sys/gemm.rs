//! fp32 matrix products by the `gemm` crate, on the memory of tensors and on libtorch's own threads.
//!
//! The crate's own pool would share the processor with libtorch's threads, which spin for a while after each operator: between
//! casts of a weight piece by piece, a quarter of the time went there. So the output is divided here, and each part is one
//! thread's product. Every part packs the operand that all share once more, at about the cost of forty multiply-adds an
//! element; parts are so large that this is a few hundredths.

use tch::Tensor;

use super::parallel;
use super::tensor::bump_version;
use crate::error::{Error, Result};

/// Rows or columns of a part, about.
const PART: usize = 2048;
/// What parts are multiples of, so that only the last has less than whole vectors.
const LEAST: usize = 64;

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
    let address = |tensor: &Tensor| tensor.data_ptr() as usize;
    let (out_at, a_at, b_at) = (address(out), address(a), address(b));
    // The larger dimension is divided, so that the smaller operand is what all parts share.
    let by_columns = n >= m;
    let long = m.max(n);
    let parts = (long / PART).max(threads).min(long.div_ceil(LEAST)).max(1);
    let size = long.div_ceil(parts).next_multiple_of(LEAST);
    let work = |part: usize| {
        let start = part * size;
        let length = size.min(long.saturating_sub(start));
        if length == 0 {
            return;
        }
        let (rows, columns) = if by_columns { (m, length) } else { (length, n) };
        let offset = |stride: isize| start as isize * stride * size_of::<f32>() as isize;
        let (a_from, b_from, out_from) =
            if by_columns { (0, offset(b_cs), offset(out_cs)) } else { (offset(a_rs), 0, offset(out_rs)) };
        // SAFETY: the caller checked that all three are fp32 CPU matrices of shapes [m, n], [m, k] and [k, n], so that every
        // element reached by these sizes and strides lies in its tensor, and in this part of it; the output's elements are
        // distinct (dense rows or columns, checked above) and apart from both operands' (checked by the caller), and no
        // other part has these; `out` is borrowed mutably until all parts are done.
        unsafe {
            gemm::gemm(
                rows,
                columns,
                k,
                out_at.wrapping_add_signed(out_from) as *mut f32,
                out_cs,
                out_rs,
                accumulate,
                a_at.wrapping_add_signed(a_from) as *const f32,
                a_cs,
                a_rs,
                b_at.wrapping_add_signed(b_from) as *const f32,
                b_cs,
                b_rs,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    };
    if threads > 1 {
        parallel::for_each(parts, work)?;
    } else {
        (0..parts).for_each(work);
    }
    bump_version(out)
}
