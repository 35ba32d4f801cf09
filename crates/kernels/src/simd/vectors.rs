//! Vectors of the chosen instructions, of either compute type.
//!
//! Explicit, because the compiler vectorizes some loops with two running sums or a conversion and not other, similar ones, which
//! are then four times as slow.

use pulp::Simd;

/// A compute type, vector by vector.
pub(crate) trait Vectors: Copy {
    type Vector<S: Simd>: Copy;
    fn splat<S: Simd>(simd: S, value: Self) -> Self::Vector<S>;
    fn plus<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    fn minus<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    /// Returns the larger of each pair.
    fn larger<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    /// a·b + c, rounded once if the processor supports it.
    fn mul_add<S: Simd>(
        simd: S,
        a: Self::Vector<S>,
        b: Self::Vector<S>,
        c: Self::Vector<S>,
    ) -> Self::Vector<S>;
    /// Returns the sum of the lanes.
    fn sum<S: Simd>(simd: S, a: Self::Vector<S>) -> Self;
    /// Splits a slice into whole vectors and the rest.
    fn split<S: Simd>(values: &[Self]) -> (&[Self::Vector<S>], &[Self]);
    fn split_mut<S: Simd>(values: &mut [Self]) -> (&mut [Self::Vector<S>], &mut [Self]);
}

macro_rules! vectors {
    ($real:ty, $vector:ident, $splat:ident, $add:ident, $sub:ident, $max:ident, $mul_add:ident, $sum:ident, $split:ident,
     $split_mut:ident) => {
        impl Vectors for $real {
            type Vector<S: Simd> = S::$vector;
            #[inline(always)]
            fn splat<S: Simd>(simd: S, value: Self) -> S::$vector {
                simd.$splat(value)
            }
            #[inline(always)]
            fn plus<S: Simd>(simd: S, a: S::$vector, b: S::$vector) -> S::$vector {
                simd.$add(a, b)
            }
            #[inline(always)]
            fn minus<S: Simd>(simd: S, a: S::$vector, b: S::$vector) -> S::$vector {
                simd.$sub(a, b)
            }
            #[inline(always)]
            fn larger<S: Simd>(simd: S, a: S::$vector, b: S::$vector) -> S::$vector {
                simd.$max(a, b)
            }
            #[inline(always)]
            fn mul_add<S: Simd>(simd: S, a: S::$vector, b: S::$vector, c: S::$vector) -> S::$vector {
                simd.$mul_add(a, b, c)
            }
            #[inline(always)]
            fn sum<S: Simd>(simd: S, a: S::$vector) -> Self {
                simd.$sum(a)
            }
            #[inline(always)]
            fn split<S: Simd>(values: &[Self]) -> (&[S::$vector], &[Self]) {
                S::$split(values)
            }
            #[inline(always)]
            fn split_mut<S: Simd>(values: &mut [Self]) -> (&mut [S::$vector], &mut [Self]) {
                S::$split_mut(values)
            }
        }
    };
}

vectors!(
    f32,
    f32s,
    splat_f32s,
    add_f32s,
    sub_f32s,
    max_f32s,
    mul_add_e_f32s,
    reduce_sum_f32s,
    as_simd_f32s,
    as_mut_simd_f32s
);
vectors!(
    f64,
    f64s,
    splat_f64s,
    add_f64s,
    sub_f64s,
    max_f64s,
    mul_add_e_f64s,
    reduce_sum_f64s,
    as_simd_f64s,
    as_mut_simd_f64s
);
