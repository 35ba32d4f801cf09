//! fp32 matrix products by the `gemm` crates, on the memory of tensors and on libtorch's own threads.
//!
//! The crate's own pool would share the processor with libtorch's threads, which spin for a while after each operator: between
//! casts of a weight piece by piece, a quarter of the time went there. So the output is divided here, and each part is one
//! thread's product. Every part packs the operand that all share once more, at about the cost of forty multiply-adds an
//! element; parts are so large that this is a few hundredths.

use gemm_common::Parallelism;
use tch::Tensor;

use super::parallel;
use super::tensor::bump_version;
use crate::error::{Error, Result};
use crate::processor::{Simd, simd};

/// Rows or columns of a part, at most about.
const PART: usize = 2048;
/// Rows or columns of a part, at least, less [`STEP`]: an output below twice as many on its longer side is one part.
const LEAST: usize = 96;
/// What the parts begin at multiples of, so that only the last has less than whole vectors.
const STEP: usize = 16;

/// `out = a·b`, or `out += a·b`, for fp32 CPU matrices of any strides; shapes, dtypes, layouts, and that the output
/// shares no memory with an operand, are checked by the caller.
///
/// The bits do not depend on `threads` where the output has [`SHORTEST`] rows and columns: each element is summed over k in blocks
/// whose length the crate takes from k and the processor, and from m and n only in that outputs of up to 64 × 64 have another.
/// Parts are longer than 64, and an output that is one part for some number of threads only is longer than that. The crate's other
/// paths are for outputs of 256 elements and fewer, and for single rows and columns, which no part of such an output is.
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
    // Each element of the output has memory of its own: dense rows or dense columns, in windows of larger matrices too.
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
    let kernel = kernel();
    // The larger dimension is divided, so that the smaller operand is what all parts share.
    let by_columns = n >= m;
    let long = m.max(n);
    let parts = (long / PART).max(threads).min(long / LEAST).max(1);
    let boundary = |part: usize| if part == parts { long } else { long * part / parts / STEP * STEP };
    let work = |part: usize| {
        let (start, length) = (boundary(part), boundary(part + 1) - boundary(part));
        let (rows, columns) = if by_columns { (m, length) } else { (length, n) };
        let offset = |stride: isize| start as isize * stride * size_of::<f32>() as isize;
        let (a_from, b_from, out_from) =
            if by_columns { (0, offset(b_cs), offset(out_cs)) } else { (offset(a_rs), 0, offset(out_rs)) };
        let to = out_at.wrapping_add_signed(out_from) as *mut f32;
        let left = (a_at.wrapping_add_signed(a_from) as *const f32, a_cs, a_rs);
        let right = (b_at.wrapping_add_signed(b_from) as *const f32, b_cs, b_rs);
        // The kernels write columns: a row-major output is the transposed product of the transposed operands.
        let transposed = |(at, cs, rs): (*const f32, isize, isize)| (at, rs, cs);
        let ((rows, columns), (to_cs, to_rs), left, right) = if out_cs.abs() < out_rs.abs() {
            ((columns, rows), (out_rs, out_cs), transposed(right), transposed(left))
        } else {
            ((rows, columns), (out_cs, out_rs), left, right)
        };
        // SAFETY: the caller checked that all three are fp32 CPU matrices of shapes [m, n], [m, k] and [k, n], so that every
        // element reached by these sizes and strides lies in its tensor, and in this part of it; the output's elements are
        // distinct (dense rows or columns, checked above) and apart from both operands' (checked by the caller), and no
        // other part has these; `out` is borrowed mutably until all parts are done. The processor has the kernel's instructions.
        unsafe {
            kernel(
                rows,
                columns,
                k,
                to,
                to_cs,
                to_rs,
                accumulate,
                left.0,
                left.1,
                left.2,
                right.0,
                right.1,
                right.2,
                1.0,
                1.0,
                false,
                false,
                false,
                Parallelism::None,
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

/// Rows and columns of an output from which on its bits are the same for any number of threads.
pub(crate) const SHORTEST: i64 = 32;

type Kernel = unsafe fn(
    usize,
    usize,
    usize,
    *mut f32,
    isize,
    isize,
    bool,
    *const f32,
    isize,
    isize,
    *const f32,
    isize,
    isize,
    f32,
    f32,
    bool,
    bool,
    bool,
    Parallelism,
);

/// The crate's own choice is the widest that the processor has; a narrower one is made here of the crate's parts.
fn kernel() -> Kernel {
    match simd() {
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 if Simd::Avx512.is_there() => narrower::avx2,
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        Simd::Scalar => narrower::scalar,
        _ => gemm_f32::gemm::f32::get_gemm_fn(),
    }
}

/// Products with narrower vectors than the processor's.
mod narrower {
    use gemm_common::Parallelism;
    use gemm_common::gemm::gemm_basic_generic;
    use gemm_common::simd::MixedSimd;

    macro_rules! product {
        ($(#[$attribute:meta])? $name:ident, $module:ident, $simd:ident, $lanes:literal) => {
            $(#[$attribute])?
            /// # Safety
            /// As the crate's own; the processor has the instructions.
            #[allow(clippy::too_many_arguments, reason = "a BLAS signature")]
            pub(super) unsafe fn $name(
                m: usize,
                n: usize,
                k: usize,
                to: *mut f32,
                to_cs: isize,
                to_rs: isize,
                accumulate: bool,
                a: *const f32,
                a_cs: isize,
                a_rs: isize,
                b: *const f32,
                b_cs: isize,
                b_rs: isize,
                alpha: f32,
                beta: f32,
                conjugate_to: bool,
                conjugate_a: bool,
                conjugate_b: bool,
                parallelism: Parallelism,
            ) {
                use gemm_f32::microkernel::$module::f32::{H_M, H_N, H_UKR, MR_DIV_N, NR, UKR};

                let simd = <gemm_common::simd::$simd as MixedSimd<f32, f32, f32, f32>>::try_new()
                    .expect("`kernel` takes what the processor has");
                // SAFETY: as the caller says.
                unsafe {
                    gemm_basic_generic::<_, f32, $lanes, { MR_DIV_N * $lanes }, NR, MR_DIV_N, H_M, H_N>(
                        simd, m, n, k, to, to_cs, to_rs, accumulate, a, a_cs, a_rs, b, b_cs, b_rs, alpha, beta,
                        conjugate_to, conjugate_a, conjugate_b, |a, b, c| a * b + c, &UKR, &H_UKR, false,
                        parallelism,
                    );
                }
            }
        };
    }

    product!(
        #[cfg(target_arch = "x86_64")]
        avx2,
        fma,
        V3,
        8
    );
    product!(scalar, scalar, Scalar, 1);
}
