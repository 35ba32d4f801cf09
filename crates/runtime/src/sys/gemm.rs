//! fp32 matrix products by the `gemm` crates, on the memory of tensors and on libtorch's own threads.
//!
//! The crate's own thread pool would compete with libtorch's threads, which spin for a while after each operator; between
//! piecewise casts of a weight, that took a quarter of the time. So the output is divided here, and each part is one
//! thread's product. Every part packs the shared operand again, at about the cost of forty multiply-adds per
//! element; parts are so large that this is a few percent.

use gemm_common::Parallelism;
use tch::Tensor;

use super::parallel;
use super::tensor::bump_version;
use crate::error::{Error, Result};
use crate::processor::{Simd, simd};

/// Approximate maximum of a part's rows or columns.
const PART: usize = 2048;
/// Minimum of a part's rows or columns, plus [`STEP`]: an output whose longer side is below twice this is one part.
const LEAST: usize = 96;
/// Parts begin at multiples of this, so that only the last one has partial vectors.
const STEP: usize = 16;

/// Computes `out = a·b`, or `out += a·b`, for fp32 CPU matrices of any strides. The caller checks shapes, dtypes, layouts, and
/// that the output shares no memory with an operand.
///
/// The bits do not depend on `threads` if the output has at least [`SHORTEST`] rows and columns: each element is summed over k in
/// blocks whose length depends on k and the processor, and on m and n only in that outputs of up to 64 × 64 have another length.
/// Parts are longer than 64, and so is an output that is one part for some numbers of threads but not for others. The crate's other
/// paths are for outputs of at most 256 elements, and for single rows and columns, which are no parts of such an output.
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
    // No two elements of the output share memory: it has dense rows or dense columns, also as a window of a larger matrix.
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
    // The larger dimension is divided, so that the parts share the smaller operand.
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
        // The kernels write column-major: a row-major output is computed as the product of the transposed operands, transposed.
        let transposed = |(at, cs, rs): (*const f32, isize, isize)| (at, rs, cs);
        let ((rows, columns), (to_cs, to_rs), left, right) = if out_cs.abs() < out_rs.abs() {
            ((columns, rows), (out_rs, out_cs), transposed(right), transposed(left))
        } else {
            ((rows, columns), (out_cs, out_rs), left, right)
        };
        // SAFETY: the caller checked that all three are fp32 CPU matrices of shapes [m, n], [m, k] and [k, n], so that every
        // element reached by these sizes and strides lies in its tensor, and in this part of it; the output's elements are
        // distinct (dense rows or columns, checked above), overlap neither operand (checked by the caller) and belong to
        // this part only; `out` is borrowed mutably until all parts are done. The processor has the kernel's instructions.
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

/// Minimum rows and columns of an output whose bits do not depend on the number of threads.
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

/// The crate itself chooses the processor's widest instructions; a narrower choice is built here from the crate's parts.
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
                // SAFETY: by this function's contract.
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
