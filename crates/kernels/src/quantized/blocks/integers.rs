//! Vectors as integers, for AVX-512 VNNI, which adds products of unsigned and signed bytes.
//!
//! Each 16 numbers of a vector in bf16 become x = t·q with t a power of two and q of 15 bits, exact for numbers down to 1/64 of the largest.
//! q = 256·high + low, two signed bytes, so that two instructions multiply 64 codes, and every sum of a unit is an exact integer:
//!
//! ```text
//! Σ ŵ·x = Σ over units  s·t·(256·Σ c·high + Σ c·low − z·Σ q) − m·t·Σ q
//! ```

use std::arch::x86_64::*;
use std::sync::OnceLock;

use half::bf16;

use super::avx512::{Loaded, Registers};
use super::chunk::{CHUNK, UNIT, UNITS, chunks};
use super::cpu::{Padded, chunk_bytes};
use super::dots::{Readable, Vector};
use crate::matvec::streams::{STREAMS, Sums};
use crate::processor::{Simd, simd};
use crate::simd::{Element, PREFETCHED, prefetch};

/// Bits of q below those of the largest number's power of two.
const BITS: u32 = 13;

/// Returns whether the processor has the instructions.
pub(super) fn are_there() -> bool {
    static THERE: OnceLock<bool> = OnceLock::new();
    *THERE.get_or_init(|| Simd::Avx512.is_there() && is_x86_feature_detected!("avx512vnni"))
}

/// Returns whether products use the instructions.
pub(super) fn are_used() -> bool {
    simd() == Simd::Avx512 && are_there()
}

/// A chunk of a vector, in the order in which the registers of a format have the codes.
#[repr(C, align(64))]
struct Part {
    low: [i8; CHUNK],
    high: [i8; CHUNK],
    /// −z·Σ q of each four numbers.
    start: [i32; CHUNK / 4],
    /// t of each unit, in the order of the vector.
    steps: [f32; UNITS],
    /// t·Σ q of each unit, likewise.
    sums: [f32; UNITS],
}

pub(super) struct Integers(Vec<Part>);

impl Integers {
    pub(super) fn new<F: Registers>(x: &[bf16]) -> Self {
        // SAFETY: there are such vectors only where the processor has the instructions.
        Self(chunks(x).map(|x| unsafe { part::<F>(&x) }).collect())
    }
}

/// # Safety
/// The processor has AVX-512 F, BW, VL and DQ.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn part<F: Registers>(x: &[bf16; CHUNK]) -> Part {
    let mut part = Part {
        low: [0; CHUNK],
        high: [0; CHUNK],
        start: [0; CHUNK / 4],
        steps: [0.0; UNITS],
        sums: [0.0; UNITS],
    };
    for (place, unit) in F::ORDER.into_iter().enumerate() {
        let (integers, step) = rounded(&x.as_chunks::<UNIT>().0[unit]);
        for (at, integer) in integers.into_iter().enumerate() {
            let high = (integer + 128) >> 8;
            part.high[place * UNIT + at] = high as i8;
            part.low[place * UNIT + at] = (integer - 256 * high) as i8;
            part.start[(place * UNIT + at) / 4] -= i32::from(F::ZERO) * integer;
        }
        part.steps[unit] = step;
        part.sums[unit] = step * integers.iter().sum::<i32>() as f32;
    }
    part
}

/// Returns the integers of numbers that share t, and t: not a number if one of them is infinite or none.
///
/// Loops, which the compiler vectorizes for the instructions of the caller.
#[inline(always)]
pub(super) fn rounded<const N: usize>(x: &[bf16; N]) -> ([i32; N], f32) {
    let mut numbers = [0f32; N];
    let mut most = 0;
    for at in 0..N {
        numbers[at] = x[at].widen();
        most = most.max(numbers[at].to_bits() & 0x7fff_ffff);
    }
    let mut integers = [0; N];
    let exponent = (most >> 23).max(BITS + 1);
    if exponent == 255 {
        // So is every product.
        return (integers, f32::NAN);
    }
    let step = f32::from_bits((exponent - BITS) << 23);
    for at in 0..N {
        // Of at most BITS + 1 bits, so the conversion neither saturates nor meets what is no number.
        let integer = (numbers[at] * (1.0 / step)).round_ties_even();
        // SAFETY: the integer fits.
        integers[at] = unsafe { integer.to_int_unchecked() };
    }
    (integers, step)
}

impl Vector for Integers {
    fn dots<F: Readable, const N: usize>(rows: [&[u8]; STREAMS], x: [&Self; N], sums: &mut Sums) {
        // SAFETY: there are such vectors only where the processor has the instructions.
        unsafe { dots::<F, N>(rows, x, sums) }
    }
}

/// # Safety
/// The processor has AVX-512 F, BW, VL, DQ and VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
unsafe fn dots<F: Registers, const N: usize>(rows: [&[u8]; STREAMS], x: [&Integers; N], out: &mut Sums) {
    let mut memory = [const { Padded::uninit() }; STREAMS];
    // The unit of each lane.
    let units: [[i32; 16]; 4] =
        std::array::from_fn(|part| std::array::from_fn(|lane| F::ORDER[4 * part + lane / 4] as i32));
    // SAFETY: by this function's contract; every load reads a whole array.
    unsafe {
        let units = units.map(|units| _mm512_loadu_si512(units.as_ptr().cast()));
        let mut sums = [[_mm512_setzero_ps(); N]; STREAMS];
        for number in 0..x[0].0.len() {
            for stream in 0..STREAMS {
                let bytes = chunk_bytes::<F>(rows[stream], number, &mut memory[stream]);
                prefetch(bytes.as_ptr() as usize + PREFETCHED, F::BYTES);
                let Loaded { codes, scales, minima } = F::load(bytes);
                for vector in 0..N {
                    let part = &x[vector].0[number];
                    let sum = &mut sums[stream][vector];
                    let scales = _mm512_mul_ps(scales, _mm512_load_ps(part.steps.as_ptr()));
                    for quarter in 0..4 {
                        let [low, high] = [&part.low, &part.high]
                            .map(|bytes| _mm512_load_si512(bytes.as_ptr().add(64 * quarter).cast()));
                        let start = _mm512_load_si512(part.start.as_ptr().add(16 * quarter).cast());
                        let low = _mm512_dpbusd_epi32(start, codes[quarter], low);
                        let high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes[quarter], high);
                        let both = _mm512_add_epi32(_mm512_slli_epi32::<8>(high), low);
                        let scale = _mm512_permutexvar_ps(units[quarter], scales);
                        *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(both), scale, *sum);
                    }
                    if F::HAS_MINIMA {
                        *sum = _mm512_fnmadd_ps(minima, _mm512_load_ps(part.sums.as_ptr()), *sum);
                    }
                }
            }
        }
        for (out, sums) in out.iter_mut().zip(&sums) {
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = _mm512_reduce_add_ps(*sum);
            }
        }
    }
}
