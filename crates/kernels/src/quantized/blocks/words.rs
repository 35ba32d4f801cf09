//! Products of codes with vectors as integers, for AVX2, which multiplies pairs of 16 bits and adds them.
//!
//! A vector is rounded as in [`integers`](super::integers), but for two differences: q has 16 bits, so that an instruction multiplies 16
//! codes, a unit; and 32 numbers, a pair of units, have one t, so that the sums of a pair are added as integers where it has one scale. Every such
//! sum is exact:
//!
//! ```text
//! Σ ŵ·x = Σ over units or pairs  s·t·Σ (c − z)·q − m·t·Σ q
//! ```

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use half::bf16;

use super::avx2::{Loaded, Registers};
use super::chunk::{CHUNK, UNIT, UNITS, chunks};
use super::cpu::{Padded, chunk_bytes};
use super::dots::{Readable, Vector};
use super::integers::rounded;
use crate::matvec::streams::{STREAMS, Sums};
use crate::processor::{Simd, simd};
use crate::simd::{PREFETCHED, prefetch};

/// Returns whether products use the instructions, unless there are those of [`integers`](super::integers).
pub(super) fn are_used() -> bool {
    matches!(simd(), Simd::Avx2 | Simd::Avx512)
}

/// Numbers that share t.
const PAIR: usize = 2 * UNIT;

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
        // SAFETY: there are such vectors only where the processor has the instructions.
        Self(chunks(x).map(|x| unsafe { part(&x) }).collect())
    }
}

/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
unsafe fn part(x: &[bf16; CHUNK]) -> Part {
    let mut part = Part { numbers: [0; CHUNK], steps: [0.0; UNITS], sums: [0.0; UNITS] };
    for (pair, x) in x.as_chunks::<PAIR>().0.iter().enumerate() {
        let (integers, step) = rounded(x);
        for (unit, integers) in (2 * pair..).zip(integers.as_chunks::<UNIT>().0) {
            for (number, integer) in part.numbers[unit * UNIT..].iter_mut().zip(integers) {
                *number = *integer as i16;
            }
            part.steps[unit] = step;
            part.sums[unit] = step * integers.iter().sum::<i32>() as f32;
        }
    }
    part
}

impl Vector for Words {
    fn dots<F: Readable, const N: usize>(rows: [&[u8]; STREAMS], x: [&Self; N], sums: &mut Sums) {
        // SAFETY: there are such vectors only where the processor has the instructions.
        unsafe { dots::<F, N>(rows, x, sums) }
    }
}

/// Rows that are multiplied together: their sums with four vectors leave registers for a pair of units.
const ROWS: usize = 2;

/// # Safety
/// The processor has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots<F: Registers, const N: usize>(rows: [&[u8]; STREAMS], x: [&Words; N], out: &mut Sums) {
    // SAFETY: by this function's contract; every load and store is within an array, and parts are aligned.
    unsafe {
        let mut sums = [[[_mm256_setzero_ps(); N]; ROWS]; STREAMS / ROWS];
        for number in 0..x[0].0.len() {
            for (rows, sums) in rows.as_chunks::<ROWS>().0.iter().zip(&mut sums) {
                let mut parts = [&x[0].0[number]; N];
                for vector in 0..N {
                    parts[vector] = &x[vector].0[number];
                }
                add::<F, N>(rows, number, parts, sums);
            }
        }
        for (out, sums) in out.iter_mut().zip(sums.as_flattened()) {
            for (out, sum) in out.iter_mut().zip(sums) {
                let four = _mm_add_ps(_mm256_castps256_ps128(*sum), _mm256_extractf128_ps::<1>(*sum));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                *out = _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)));
            }
        }
    }
}

/// Adds the products of a chunk of each row.
///
/// # Safety
/// As [`dots`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn add<F: Registers, const N: usize>(
    rows: &[&[u8]; ROWS],
    number: usize,
    parts: [&Part; N],
    sums: &mut [[__m256; N]; ROWS],
) {
    let mut memory = [const { Padded::uninit() }; ROWS];
    // The product of each unit's scale with t, for each vector.
    let mut factors = [const { [const { MaybeUninit::<[f32; UNITS]>::uninit() }; N] }; ROWS];
    // SAFETY: by this function's contract; every load and store is within an array, and parts are aligned. Factors are written before they are read.
    unsafe {
        let [first, second] = &mut memory;
        let loaded = [load::<F>(rows[0], number, first), load::<F>(rows[1], number, second)];
        let mut new = *sums;
        for row in 0..ROWS {
            let Loaded { scales, minima, .. } = &loaded[row];
            for vector in 0..N {
                for half in 0..2 {
                    let steps = _mm256_load_ps(parts[vector].steps.as_ptr().add(8 * half));
                    let to = factors[row][vector].as_mut_ptr().cast::<f32>().add(8 * half);
                    _mm256_storeu_ps(to, _mm256_mul_ps(scales[half], steps));
                    if F::HAS_MINIMA {
                        let of_units = _mm256_load_ps(parts[vector].sums.as_ptr().add(8 * half));
                        new[row][vector] = _mm256_fnmadd_ps(minima[half], of_units, new[row][vector]);
                    }
                }
            }
        }
        for four in 0..UNITS / 4 {
            let mut units = [[_mm_setzero_si128(); 4]; ROWS];
            for row in 0..ROWS {
                for half in 0..2 {
                    let codes = loaded[row].codes[2 * four + half];
                    units[row][2 * half] = _mm256_castsi256_si128(codes);
                    units[row][2 * half + 1] = _mm256_extracti128_si256::<1>(codes);
                }
            }
            for pair in 0..2 {
                let unit = 4 * four + 2 * pair;
                let mut words = [[_mm256_setzero_si256(); 2]; ROWS];
                for row in 0..ROWS {
                    words[row][0] = _mm256_cvtepi8_epi16(units[row][F::ORDER[2 * pair]]);
                    words[row][1] = _mm256_cvtepi8_epi16(units[row][F::ORDER[2 * pair + 1]]);
                }
                for vector in 0..N {
                    let numbers = parts[vector].numbers.as_ptr().add(UNIT * unit);
                    let first = _mm256_load_si256(numbers.cast());
                    let second = _mm256_load_si256(numbers.add(UNIT).cast());
                    for row in 0..ROWS {
                        let first = _mm256_madd_epi16(words[row][0], first);
                        let second = _mm256_madd_epi16(words[row][1], second);
                        let factors = factors[row][vector].assume_init_ref();
                        let factor = _mm256_broadcast_ss(&factors[unit]);
                        let sum = &mut new[row][vector];
                        if F::PAIRS {
                            let both = _mm256_cvtepi32_ps(_mm256_add_epi32(first, second));
                            *sum = _mm256_fmadd_ps(both, factor, *sum);
                        } else {
                            *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(first), factor, *sum);
                            let factor = _mm256_broadcast_ss(&factors[unit + 1]);
                            *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(second), factor, *sum);
                        }
                    }
                }
            }
        }
        *sums = new;
    }
}

/// Reads a chunk, and prefetches one.
///
/// # Safety
/// As [`dots`].
#[inline(always)]
unsafe fn load<F: Registers>(row: &[u8], number: usize, memory: &mut Padded) -> Loaded {
    let bytes = chunk_bytes::<F>(row, number, memory);
    prefetch(bytes.as_ptr() as usize + PREFETCHED, F::BYTES);
    // SAFETY: by this function's contract; the chunk has its bytes.
    unsafe { F::load(bytes) }
}
