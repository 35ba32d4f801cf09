//! Products with narrower vectors than the processor's.

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
                .expect("`kernel` needs instructions that the processor has");
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
