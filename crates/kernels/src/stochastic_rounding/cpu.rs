//! Stochastic rounding in one pass over memory; the mathematics are in [`crate::stochastic_rounding`].

use std::marker::PhantomData;

use half::{bf16, f16};
use pulp::{Simd, WithSimd};
use runtime::Result;
use runtime::parallel;
use runtime::tensor_memory::bump_version;
use tch::{Device, Kind};

use super::{LEAST_NORMAL_F16, NAME, Rounding, RoundingPass, StepNumber, hash};
use crate::operands::Operands;
use crate::simd::{self, Element};

/// Elements of a hash.
const SHARED: u64 = 4;
/// Elements computed at once.
const BLOCK: usize = 32;
/// Elements of one task: 256 KiB of fp32.
const TASK: usize = 64 * 1024;

/// A dtype that numbers are rounded to.
trait Target: Element<Compute = f32> {
    /// Rounds with a uniform integer below 2¹⁶.
    fn round_with(value: f32, random: u32) -> Self;
}

impl Target for bf16 {
    #[inline(always)]
    fn round_with(value: f32, random: u32) -> Self {
        let bits = value.to_bits();
        let rounded = bf16::from_bits((bits.wrapping_add(random) >> 16) as u16);
        if bits & 0x7fff_ffff >= 0x7f7f_0000 { Self::round(value) } else { rounded }
    }
}

impl Target for f16 {
    #[inline(always)]
    fn round_with(value: f32, random: u32) -> Self {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(random >> 3) >> 13;
        // Exact: a power of two, and fewer than 2¹⁰ of the spacings of subnormal numbers.
        let scaled = f32::from_bits(magnitude.min(LEAST_NORMAL_F16)) * 2.0f32.powi(24);
        let floor = scaled as i32;
        let rest = ((scaled - floor as f32) * 65536.0) as i32;
        let subnormal = (floor + ((rest + random as i32) >> 16)) as u32;
        let rounded = if magnitude < LEAST_NORMAL_F16 { subnormal } else { normal };
        let rounded = f16::from_bits((rounded | (bits >> 16) & 0x8000) as u16);
        // From 65504 on.
        if magnitude >= 0x477f_e000 { Self::round(value) } else { rounded }
    }
}

/// One pass over memory, on libtorch's threads.
pub(super) struct Cpu;

impl RoundingPass for Cpu {
    fn round(&self, all: &[Rounding<'_>]) -> Result<()> {
        all.iter().try_for_each(round)
    }
}

/// Rounds a contiguous source into a contiguous target, both on the CPU and of one size, as the caller has checked.
fn round(one: &Rounding<'_>) -> Result<()> {
    let &Rounding { source, target, stream, step } = one;
    let step = match step {
        StepNumber::Host(step) => step,
        StepNumber::Device(number) => number.f_double_value(&[])? as u64,
    };
    let elements = source.numel();
    if elements == 0 {
        return Ok(());
    }
    let mut operands = Operands::new(NAME, Device::Cpu);
    let from = operands.read("source", source, Kind::Float, elements)?;
    let to = operands.write("target", target, target.kind(), elements)?;
    operands.check()?;
    let pass = Pass { elements, source: from, target: to, seed: stream.at(step), first: stream.first() };
    // SAFETY: both tensors are dense, on the CPU, of this many elements of fp32 and of the target's dtype, do not overlap, and outlive
    // the call. As with every in-place operation of libtorch, the caller ensures that no thread uses them meanwhile.
    unsafe {
        match target.kind() {
            Kind::Half => run::<f16>(pass),
            _ => run::<bf16>(pass),
        }
    }?;
    bump_version(target)
}

/// Addresses, and the hashes' seed with the index of the first element.
#[derive(Clone, Copy)]
struct Pass {
    elements: usize,
    source: usize,
    target: usize,
    seed: u64,
    first: u64,
}

/// # Safety
/// This many elements lie at each address: of fp32 at the source's, of `T` at the target's, which only the caller uses during the call.
unsafe fn run<T: Target>(pass: Pass) -> Result<()> {
    let arch = simd::arch();
    parallel::for_each(pass.elements.div_ceil(TASK), |task| {
        let (from, to) = (task * TASK, pass.elements.min((task + 1) * TASK));
        arch.dispatch(Task::<T> { pass, from, to, target: PhantomData });
    })
}

struct Task<T> {
    pass: Pass,
    from: usize,
    to: usize,
    target: PhantomData<T>,
}

impl<T: Target> WithSimd for Task<T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { pass, from, to, .. } = self;
        let count = to - from;
        // SAFETY: by the contract of `run`, which gives each element to one task.
        let (source, target) = unsafe {
            let source = (pass.source as *const f32).wrapping_add(from);
            let target = (pass.target as *mut T).wrapping_add(from);
            (std::slice::from_raw_parts(source, count), std::slice::from_raw_parts_mut(target, count))
        };
        let first = pass.first + from as u64;
        let one = |at: usize, target: &mut T| {
            let index = first + at as u64;
            let random = hash(pass.seed, index / SHARED + 1) >> (16 * (index % SHARED));
            *target = T::round_with(source[at], random as u32 & 0xffff);
        };
        let head = ((SHARED - first % SHARED) % SHARED) as usize;
        let head = head.min(count);
        let blocks = head + (count - head) / BLOCK * BLOCK;
        (0..head).for_each(|at| one(at, &mut target[at]));
        for at in (head..blocks).step_by(BLOCK) {
            let counter = (first + at as u64) / SHARED + 1;
            let mut hashes = [0; BLOCK / SHARED as usize];
            for (hash_of, counter) in hashes.iter_mut().zip(counter..) {
                *hash_of = hash(pass.seed, counter);
            }
            let mut random = [0; BLOCK];
            for (four, hash) in random.chunks_exact_mut(SHARED as usize).zip(hashes) {
                for (random, quarter) in four.iter_mut().zip(0..) {
                    *random = (hash >> (16 * quarter)) as u32 & 0xffff;
                }
            }
            let (source, target) = (&source[at..at + BLOCK], &mut target[at..at + BLOCK]);
            for i in 0..BLOCK {
                target[i] = T::round_with(source[i], random[i]);
            }
        }
        (blocks..count).for_each(|at| one(at, &mut target[at]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Over all random numbers the mean is the number itself, and no result is further than a neighbour.
    fn check<T: Target>(value: f32, slack: f64) {
        let all = (0..1 << 16).map(|random| f64::from(T::round_with(value, random).widen()));
        let (mut sum, mut least, mut most) = (0.0, f64::INFINITY, f64::NEG_INFINITY);
        for rounded in all {
            (sum, least, most) = (sum + rounded, least.min(rounded), most.max(rounded));
        }
        let wide = f64::from(value);
        assert!(least <= wide && wide <= most, "{value:e}: from {least:e} to {most:e}");
        let spacing = most - least;
        assert!((sum / 65536.0 - wide).abs() <= slack * spacing, "{value:e}: mean {:e}", sum / 65536.0);
        let nearest = f64::from(T::round(value).widen());
        assert!(nearest == least || nearest == most, "{value:e}: {least:e}, {nearest:e}, {most:e}");
    }

    #[test]
    fn the_mean_is_the_number() {
        for exponent in [-149, -140, -130, -126, -27, -14, -13, -1, 0, 1, 14] {
            for fraction in [1.0, 1.000_000_1, 1.1, 1.337, 1.992_187_5, 1.999_999_9] {
                for sign in [1.0, -1.0] {
                    let value = sign * (fraction * 2f64.powi(exponent)) as f32;
                    check::<bf16>(value, 0.0);
                    // fp16's subnormal numbers lack more bits than are drawn.
                    let slack = if exponent < -14 { 2f64.powi(-16) } else { 0.0 };
                    if exponent >= -27 {
                        check::<f16>(value, slack);
                    }
                }
            }
        }
    }

    #[test]
    fn numbers_of_the_target_are_kept_and_no_infinity_is_made() {
        for random in [0, 1, 0x7fff, 0xffff] {
            for bits in 0..=u16::MAX {
                let (wide, narrow) = (bf16::from_bits(bits), f16::from_bits(bits));
                let kept = bf16::round_with(wide.widen(), random);
                assert!(kept.to_bits() == bits || kept.is_nan() && wide.is_nan(), "{wide} became {kept}");
                let kept = f16::round_with(narrow.widen(), random);
                assert!(kept.to_bits() == bits || kept.is_nan() && narrow.is_nan(), "{narrow} became {kept}");
            }
            // Beyond the largest number they are rounded to nearest.
            for value in [65504.1, 65519.9, -65519.9, 65520.0, 1e30] {
                assert_eq!(f16::round_with(value, random), f16::round(value), "{value}");
            }
            for bits in [0x7f7f_0001, 0x7f7f_7fff, 0x7f7f_8000, 0xff7f_ffff] {
                let value = f32::from_bits(bits);
                assert_eq!(bf16::round_with(value, random), bf16::round(value), "{value}");
            }
            assert!(f16::round_with(65503.9, random).is_finite());
            // A NaN whose bits a sum would carry out of.
            assert!(bf16::round_with(f32::from_bits(0x7fff_ffff), random).is_nan());
        }
    }

    /// Outputs 1 to 3 of SplitMix64 for the seed 1234567, from its author's program.
    #[test]
    fn hashes_are_split_mix() {
        let found = [1, 2, 3].map(|counter| hash(1_234_567, counter));
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(found, expected);
    }
}
