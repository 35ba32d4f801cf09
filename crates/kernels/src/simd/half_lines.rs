//! fp16 to fp32 and back, dense elements at a time: by the processor's instructions, which take a tenth of the portable conversion's.

use half::f16;

use super::{blocks, load, store};
#[cfg(target_arch = "x86_64")]
use crate::processor::Simd;
use crate::processor::simd;

/// Casts `length` elements.
///
/// # Safety
/// They lie at `from` and at `to`, which do not overlap, and nothing else uses those at `to` meanwhile.
pub(crate) unsafe fn widen(from: *const f16, to: *mut f32, length: usize) {
    // SAFETY: by this function's contract; the processor has the instructions that it chose.
    unsafe {
        match simd() {
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => x86::widen_avx512(from, to, length),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => x86::widen_avx2(from, to, length),
            _ => widen_from(from, to, 0, length),
        }
    }
}

/// Rounds `length` elements to the nearest, ties to even.
///
/// # Safety
/// As [`widen`].
pub(crate) unsafe fn round(from: *const f32, to: *mut f16, length: usize) {
    // SAFETY: by this function's contract; the processor has the instructions that it chose.
    unsafe {
        match simd() {
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => x86::round_avx512(from, to, length),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => x86::round_avx2(from, to, length),
            _ => round_from(from, to, 0, length),
        }
    }
}

/// # Safety
/// As [`widen`], for the elements from `start` on.
#[inline(always)]
unsafe fn widen_from(from: *const f16, to: *mut f32, start: usize, length: usize) {
    blocks!(16, start, length, |at, N| {
        // SAFETY: by this function's contract.
        unsafe { store::<f32, N>(to.add(at), &load::<f16, N>(from.add(at))) };
    });
}

/// # Safety
/// As [`widen`], for the elements from `start` on.
#[inline(always)]
unsafe fn round_from(from: *const f32, to: *mut f16, start: usize, length: usize) {
    blocks!(16, start, length, |at, N| {
        // SAFETY: by this function's contract.
        unsafe { store::<f16, N>(to.add(at), &load::<f32, N>(from.add(at))) };
    });
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::f16;

    use super::{round_from, widen_from};

    /// # Safety
    /// As [`widen`](super::widen); the processor has AVX-512 F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn widen_avx512(from: *const f16, to: *mut f32, length: usize) {
        let vectorized = length / 16 * 16;
        // SAFETY: by this function's contract; each step has 16 of the elements.
        unsafe {
            for at in (0..vectorized).step_by(16) {
                let values = _mm256_loadu_si256(from.add(at).cast());
                _mm512_storeu_ps(to.add(at), _mm512_cvtph_ps(values));
            }
            widen_from(from, to, vectorized, length);
        }
    }

    /// # Safety
    /// As [`round`](super::round); the processor has AVX-512 F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn round_avx512(from: *const f32, to: *mut f16, length: usize) {
        let vectorized = length / 16 * 16;
        // SAFETY: by this function's contract; each step has 16 of the elements.
        unsafe {
            for at in (0..vectorized).step_by(16) {
                let values = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(from.add(at)));
                _mm256_storeu_si256(to.add(at).cast(), values);
            }
            round_from(from, to, vectorized, length);
        }
    }

    /// # Safety
    /// As [`widen`](super::widen); the processor has AVX2 and F16C.
    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn widen_avx2(from: *const f16, to: *mut f32, length: usize) {
        let vectorized = length / 8 * 8;
        // SAFETY: by this function's contract; each step has 8 of the elements.
        unsafe {
            for at in (0..vectorized).step_by(8) {
                let values = _mm_loadu_si128(from.add(at).cast());
                _mm256_storeu_ps(to.add(at), _mm256_cvtph_ps(values));
            }
            widen_from(from, to, vectorized, length);
        }
    }

    /// # Safety
    /// As [`round`](super::round); the processor has AVX2 and F16C.
    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn round_avx2(from: *const f32, to: *mut f16, length: usize) {
        let vectorized = length / 8 * 8;
        // SAFETY: by this function's contract; each step has 8 of the elements.
        unsafe {
            for at in (0..vectorized).step_by(8) {
                let values = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(from.add(at)));
                _mm_storeu_si128(to.add(at).cast(), values);
            }
            round_from(from, to, vectorized, length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Element;

    /// Every fp16 number, and fp32 numbers around every tie, at lengths that leave a rest.
    #[test]
    fn lines_have_the_bits_of_single_elements() {
        let narrow: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).chain([f16::ONE; 11]).collect();
        let mut wide = vec![0f32; narrow.len()];
        // SAFETY: both have this length.
        unsafe { widen(narrow.as_ptr(), wide.as_mut_ptr(), narrow.len()) };
        for (from, to) in narrow.iter().zip(&wide) {
            assert!(
                to.to_bits() == from.widen().to_bits() || to.is_nan() && from.is_nan(),
                "{from:?} {to:?}"
            );
        }
        for low in [0, 1, 0x0fff, 0x1000, 0x1001, 0x2000, 0x3000, 0x7fff, 0xffff] {
            let wide: Vec<f32> =
                (0..=u16::MAX).map(|high| f32::from_bits(u32::from(high) << 16 | low)).collect();
            let mut narrow = vec![f16::ZERO; wide.len() - 5];
            // SAFETY: both have at least this length.
            unsafe { round(wide.as_ptr(), narrow.as_mut_ptr(), narrow.len()) };
            for (from, to) in wide.iter().zip(&narrow) {
                let expected = <f16 as Element>::round(*from);
                assert!(
                    to.to_bits() == expected.to_bits() || to.is_nan() && from.is_nan(),
                    "{from:e} {to:?}"
                );
            }
        }
    }
}
