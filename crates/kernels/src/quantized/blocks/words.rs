//! Products of codes with vectors as integers, for AVX2, which multiplies pairs of 16 bits and adds them.
//!
//! A vector is rounded as in [`integers`](super::integers), but for one difference: x = t·q with q in 16 bits, so that an instruction multiplies 16
//! codes, a unit, and every sum of a unit is an exact integer:
//!
//! ```text
//! Σ ŵ·x = Σ over units  s·t·Σ (c − z)·q − m·t·Σ q
//! ```

use std::arch::x86_64::*;

use half::bf16;

use super::avx2::{Loaded, Registers};
use super::chunk::{CHUNK, UNIT, UNITS};
use super::cpu::{MOST_BYTES, chunk_bytes};
use super::dots::{Readable, Vector};
use super::integers::rounded;
use crate::matvec::streams::{STREAMS, Sums};
use crate::processor::{Simd, simd};
use crate::simd::{PREFETCHED, prefetch};

/// Returns whether products use the instructions, unless there are those of [`integers`](super::integers).
pub(super) fn are_used() -> bool {
    matches!(simd(), Simd::Avx2 | Simd::Avx512)
}

/// A chunk of a vector.
#[repr(C, align(32))]
struct Part {
    numbers: [i16; CHUNK],
    /// t of each unit.
    steps: [f32; UNITS],
    /// t·Σ q of each unit.
    sums: [f32; UNITS],
}

pub(super) struct Words(Vec<Part>);

impl Words {
    pub(super) fn new(x: &[bf16]) -> Self {
        Self(x.chunks(CHUNK).map(part).collect())
    }
}

fn part(x: &[bf16]) -> Part {
    let mut part = Part { numbers: [0; CHUNK], steps: [0.0; UNITS], sums: [0.0; UNITS] };
    for (unit, x) in x.chunks(UNIT).enumerate() {
        let (integers, step) = rounded(x);
        for (number, integer) in part.numbers[unit * UNIT..].iter_mut().zip(integers) {
            *number = integer as i16;
        }
        part.steps[unit] = step;
        part.sums[unit] = step * integers.iter().sum::<i32>() as f32;
    }
    part
}

impl Vector for Words {
    fn dots<F: Readable, const N: usize>(rows: [&[u8]; STREAMS], x: [&Self; N], sums: &mut Sums) {
        // SAFETY: there are such vectors only where the processor has the instructions.
        unsafe { dots::<F, N>(rows, x, sums) }
    }
}

/// # Safety
/// The processor has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots<F: Registers, const N: usize>(rows: [&[u8]; STREAMS], x: [&Words; N], out: &mut Sums) {
    let mut memory = [0; MOST_BYTES];
    // SAFETY: by this function's contract; every load and store is within an array, and parts are aligned.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); N]; STREAMS];
        let mut factors = [[0f32; UNITS]; N];
        for number in 0..x[0].0.len() {
            for stream in 0..STREAMS {
                let bytes = chunk_bytes::<F>(rows[stream], number, &mut memory);
                prefetch(bytes.as_ptr() as usize + PREFETCHED, F::BYTES);
                let Loaded { codes, scales, minima } = F::load(bytes);
                // Of one vector two sums, so that an addition need not wait for the one before.
                let mut of_stream = [sums[stream], [_mm256_setzero_ps(); N]];
                for vector in 0..N {
                    let part = &x[vector].0[number];
                    for half in 0..2 {
                        let steps = _mm256_load_ps(part.steps.as_ptr().add(8 * half));
                        let scaled = _mm256_mul_ps(scales[half], steps);
                        _mm256_storeu_ps(factors[vector].as_mut_ptr().add(8 * half), scaled);
                        if F::HAS_MINIMA {
                            let of_units = _mm256_load_ps(part.sums.as_ptr().add(8 * half));
                            let sum = &mut of_stream[if N == 1 { half } else { 0 }][vector];
                            *sum = _mm256_fnmadd_ps(minima[half], of_units, *sum);
                        }
                    }
                }
                for (place, codes) in codes.into_iter().enumerate() {
                    let halves = [_mm256_castsi256_si128(codes), _mm256_extracti128_si256::<1>(codes)];
                    for half in 0..2 {
                        let (unit, codes) = (F::ORDER[2 * place + half], _mm256_cvtepi8_epi16(halves[half]));
                        for vector in 0..N {
                            let numbers = x[vector].0[number].numbers.as_ptr().add(UNIT * unit);
                            let product = _mm256_madd_epi16(codes, _mm256_load_si256(numbers.cast()));
                            let factor = _mm256_broadcast_ss(&factors[vector][unit]);
                            let sum = &mut of_stream[if N == 1 { half } else { 0 }][vector];
                            *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(product), factor, *sum);
                        }
                    }
                }
                sums[stream] = of_stream[0];
                if N == 1 {
                    sums[stream][0] = _mm256_add_ps(of_stream[0][0], of_stream[1][0]);
                }
            }
        }
        for (out, sums) in out.iter_mut().zip(&sums) {
            for (out, sum) in out.iter_mut().zip(sums) {
                let four = _mm_add_ps(_mm256_castps256_ps128(*sum), _mm256_extractf128_ps::<1>(*sum));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                *out = _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)));
            }
        }
    }
}
