//! NF4 on the CPU: quantization, dequantization, and products of a few vectors.
//!
//! Vector instructions do not change a bit of a quantized or dequantized element: each element is one product in fp32. Products are summed
//! in another order for each choice of [`simd`].

#[cfg(target_arch = "x86_64")]
mod amx;
mod matvec;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use half::bf16;
use runtime::parallel;
use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use super::{DequantizePass, Layout, NESTED_BLOCK, expect as expect_shape, layout, nested_map};
use crate::cpu_tensor::{Output, bytes};
use crate::operands::rows;
#[cfg(target_arch = "x86_64")]
use crate::processor::{Simd, simd};
use crate::simd::Element;

pub(crate) use matvec::matvec;

/// Weights of a block, and bytes of its codes.
const BLOCK: usize = 64;
const BYTES: usize = BLOCK / 2;
/// Approximate weights of a task.
const TASK: usize = 256 * 1024;

/// The bytes of a weight.
struct Packed<'a> {
    codes: &'a [u8],
    absmax: &'a [u8],
    /// The values of the codes of scales, the bytes of the factors, and the mean.
    nested: Option<(&'static [f32; 256], &'a [u8], f32)>,
}

impl Packed<'_> {
    fn scale(&self, block: usize) -> f32 {
        match self.nested {
            None => float(self.absmax, block),
            Some((map, factors, mean)) => {
                let value = map[usize::from(self.absmax[block])];
                value * float(factors, block / NESTED_BLOCK as usize) + mean
            }
        }
    }

    /// Writes the scales of the blocks from `first` on.
    fn scales(&self, first: usize, out: &mut [f32]) {
        let Some((map, factors, mean)) = self.nested else {
            for (scale, four) in out.iter_mut().zip(self.absmax[4 * first..].as_chunks::<4>().0) {
                *scale = f32::from_ne_bytes(*four);
            }
            return;
        };
        let (mut at, mut rest) = (first, out);
        while !rest.is_empty() {
            let group = at / NESTED_BLOCK as usize;
            let count = rest.len().min((group + 1) * NESTED_BLOCK as usize - at);
            let (now, later) = rest.split_at_mut(count);
            let factor = float(factors, group);
            for (scale, code) in now.iter_mut().zip(&self.absmax[at..]) {
                *scale = map[usize::from(*code)] * factor + mean;
            }
            (at, rest) = (at + count, later);
        }
    }
}

/// Reads an fp32 of bytes at any address.
fn float(bytes: &[u8], index: usize) -> f32 {
    let mut four = [0; 4];
    four.copy_from_slice(&bytes[4 * index..4 * index + 4]);
    f32::from_ne_bytes(four)
}

/// Quantizes contiguous fp32 values, which begin with a block: writes each block's s in fp32, and the codes. Returns false for values that
/// are not finite.
pub(crate) fn quantize(values: &Tensor, absmax: &Tensor, codes: &Tensor) -> Result<bool> {
    let elements = values.numel();
    bump_version(codes)?;
    bump_version(absmax)?;
    let (from, scales, to) =
        (Output::<f32>::new(values), Output::<f32>::new(absmax), Output::<u8>::new(codes));
    let finite = AtomicBool::new(true);
    let blocks = elements.div_ceil(BLOCK);
    let task_blocks = TASK / BLOCK;
    parallel::for_each(blocks.div_ceil(task_blocks), |task| {
        let blocks = task * task_blocks..blocks.min((task + 1) * task_blocks);
        let range = blocks.start * BLOCK..elements.min(blocks.end * BLOCK);
        // SAFETY: the three tensors outlive the call, their sizes are checked, and each task has its own blocks.
        let (values, scales, codes) = unsafe {
            (from.range(range.clone()), scales.range(blocks), to.range(range.start / 2..range.end / 2))
        };
        let all = crate::simd::arch().dispatch(
            #[inline(always)]
            || portable::quantize(values, scales, codes),
        );
        finite.fetch_and(all, Ordering::Relaxed);
    })?;
    Ok(finite.into_inner())
}

/// Quantizes scales, contiguous fp32 less their mean, to eight bits: writes the factor of each 256, and the codes.
pub(crate) fn quantize_scales(scales: &Tensor, factors: &Tensor, codes: &Tensor) -> Result<()> {
    bump_version(codes)?;
    bump_version(factors)?;
    let blocks = scales.numel();
    let (factors, codes) = (Output::<u8>::new(factors), Output::<u8>::new(codes));
    for (group, start) in (0..blocks).step_by(NESTED_BLOCK as usize).enumerate() {
        let range = start..blocks.min(start + NESTED_BLOCK as usize);
        let values: Vec<f32> = range.clone().map(|index| float(bytes(scales), index)).collect();
        // SAFETY: the tensors outlive the call, and only this thread uses them.
        let (factor, codes) = unsafe { (factors.range(4 * group..4 * group + 4), codes.range(range)) };
        factor.copy_from_slice(&portable::quantize_group(&values, codes).to_ne_bytes());
    }
    Ok(())
}

/// One pass over memory, on libtorch's threads: fp32 and bf16.
pub(super) struct Cpu;

impl DequantizePass for Cpu {
    fn dequantize(
        &self,
        weight: &Tensor,
        [row_range, columns]: [Range<i64>; 2],
        out: &mut Tensor,
    ) -> Result<()> {
        match out.kind() {
            Kind::Float => window::<f32>(weight, row_range, columns, out),
            Kind::BFloat16 => window::<bf16>(weight, row_range, columns, out),
            other => Err(Error::invalid("nf4", format!("values in {other:?}; expected Float or BFloat16"))),
        }
    }
}

fn window<E: Element<Compute = f32>>(
    weight: &Tensor,
    row_range: Range<i64>,
    columns: Range<i64>,
    out: &mut Tensor,
) -> Result<()> {
    let [height, inner] = expect_shape(weight)?;
    let kind = out.kind();
    let target = rows("nf4", "out", out, (kind, Device::Cpu))?;
    let (count, width) = ((row_range.end - row_range.start) as usize, (columns.end - columns.start) as usize);
    let inside =
        row_range.start >= 0 && row_range.end <= height && columns.start >= 0 && columns.end <= inner;
    if !inside || (target.rows, target.columns) != (count, width) || !out.is_contiguous() {
        let reason =
            format!("rows {row_range:?}, columns {columns:?} of [{height}, {inner}] into {:?}", out.size());
        return Err(Error::invalid("nf4", reason));
    }
    bump_version(out)?;
    let packed = packed(weight)?;
    let to = Output::<E>::new(out);
    let first = row_range.start as usize * inner as usize + columns.start as usize;
    let task_rows = (TASK / width.max(1)).max(1);
    parallel::for_each(count.div_ceil(task_rows), |task| {
        for row in task * task_rows..count.min((task + 1) * task_rows) {
            // SAFETY: the output outlives the call, and each row belongs to one task.
            let out = unsafe { to.range(row * width..(row + 1) * width) };
            fill(&packed, first + row * inner as usize, out);
        }
    })
}

/// Views the bytes of a weight on the CPU.
fn packed(weight: &Tensor) -> Result<Packed<'_>> {
    let Layout { codes, absmax, nested } = layout(weight)?;
    let bytes = bytes(weight);
    let nested = nested.map(|[factors, mean]| (nested_map(), &bytes[factors], float(&bytes[mean], 0)));
    Ok(Packed { codes: &bytes[codes], absmax: &bytes[absmax], nested })
}

/// Dequantizes the weights from `start` on.
fn fill<E: Element<Compute = f32>>(packed: &Packed<'_>, start: usize, out: &mut [E]) {
    match choice() {
        // SAFETY: the processor has the instructions.
        #[cfg(target_arch = "x86_64")]
        Choice::Avx512 => unsafe { x86::fill_avx512(packed, start, out) },
        // SAFETY: likewise.
        #[cfg(target_arch = "x86_64")]
        Choice::Avx2 => unsafe { x86::fill_avx2(packed, start, out) },
        Choice::Portable => fill_by(packed, start, out, portable::block),
    }
}

/// Dequantizes whole blocks by `block`, and parts of blocks at both ends.
#[inline(always)]
fn fill_by<E: Element<Compute = f32>>(
    packed: &Packed<'_>,
    start: usize,
    out: &mut [E],
    block: impl Fn(&[u8; BYTES], f32, &mut [f32; BLOCK]),
) {
    let (mut at, mut rest) = (start, out);
    let mut values = [0.0; BLOCK];
    while !rest.is_empty() {
        let (number, skipped) = (at / BLOCK, at % BLOCK);
        let (now, later) = rest.split_at_mut(rest.len().min(BLOCK - skipped));
        let codes = &packed.codes[number * BYTES..packed.codes.len().min((number + 1) * BYTES)];
        let scale = packed.scale(number);
        match codes.first_chunk::<BYTES>() {
            Some(codes) => block(codes, scale, &mut values),
            None => {
                let mut padded = [0; BYTES];
                padded[..codes.len()].copy_from_slice(codes);
                portable::block(&padded, scale, &mut values);
            }
        }
        for (to, value) in now.iter_mut().zip(&values[skipped..]) {
            *to = E::round(*value);
        }
        at += now.len();
        rest = later;
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Choice {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

fn choice() -> Choice {
    static CHOICE: OnceLock<Choice> = OnceLock::new();
    *CHOICE.get_or_init(|| {
        #[cfg(target_arch = "x86_64")]
        match simd() {
            Simd::Avx512 => return Choice::Avx512,
            Simd::Avx2 => return Choice::Avx2,
            _ => {}
        }
        Choice::Portable
    })
}

#[cfg(test)]
mod tests {
    use super::matvec::{Row, arranged, arranged_in_pairs};
    use super::*;
    use crate::matvec::streams::VECTORS;

    fn pseudo(count: usize) -> impl Iterator<Item = u32> {
        (0..count as u32).map(|index| index.wrapping_mul(2_654_435_761).rotate_left(13) ^ index)
    }

    /// Whatever the processor, in one process: the choices of `FRUGAL_SIMD` test the dispatch.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn every_choice_dequantizes_the_same_bits_and_sums_within_rounding() {
        let blocks = 7;
        let codes: Vec<u8> = pseudo(blocks * BYTES).map(|word| word as u8).collect();
        let scales: Vec<f32> = pseudo(blocks).map(|word| word as f32 / 2e9 + 1e-3).collect();
        let absmax: Vec<u8> = scales.iter().flat_map(|scale| scale.to_ne_bytes()).collect();
        let packed = Packed { codes: &codes, absmax: &absmax, nested: None };
        let of = |fill: &dyn Fn(usize, &mut [f32]), start: usize, count: usize| {
            let mut out = vec![0f32; count];
            fill(start, &mut out);
            out
        };
        let portable = |start: usize, out: &mut [f32]| fill_by(&packed, start, out, portable::block);
        let x: Vec<Vec<f32>> = (0..4)
            .map(|vector| pseudo(blocks * BLOCK).map(|word| (word ^ vector) as f32 / 4e9 - 0.5).collect())
            .collect();
        let arranged: Vec<Vec<f32>> = x.iter().map(|x| arranged(x)).collect();
        let plain: [&[f32]; 4] = std::array::from_fn(|index| &x[index][..]);
        let parts: [&[f32]; 4] = std::array::from_fn(|index| &arranged[index][..]);
        let row = Row { codes: &codes, scales: &scales };
        let mut expected = [0.0; VECTORS];
        portable::dots(&row, plain, &mut expected);
        let near = |found: &[f32]| {
            let most = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(most < 2e-4, "{most}: {found:?}, {expected:?}");
        };
        for (start, count) in [(0, blocks * BLOCK), (1, 130), (63, 2), (64, 64), (100, 301)] {
            let reference = of(&portable, start, count);
            if Simd::Avx2.is_there() {
                // SAFETY: the processor has AVX2.
                let fill = |start: usize, out: &mut [f32]| unsafe { x86::fill_avx2(&packed, start, out) };
                assert_eq!(of(&fill, start, count), reference);
            }
            if Simd::Avx512.is_there() {
                // SAFETY: the processor has AVX-512.
                let fill = |start: usize, out: &mut [f32]| unsafe { x86::fill_avx512(&packed, start, out) };
                assert_eq!(of(&fill, start, count), reference);
            }
        }
        if Simd::Avx2.is_there() {
            // SAFETY: the processor has AVX2; codes, scales and vectors are of the same blocks.
            unsafe {
                let mut sums = [0.0; VECTORS];
                x86::dots_avx2(&row, parts, &mut sums);
                near(&sums);
                x86::dots_avx2(&row, [parts[0]], &mut sums);
                near(&sums[..1]);
            }
        }
        if Simd::Avx512.is_there() {
            // SAFETY: likewise for AVX-512.
            unsafe {
                let mut sums = [[0.0; VECTORS]; 4];
                x86::dots_avx512(&[row; 4], parts, &mut sums);
                sums.iter().for_each(|sums| near(sums));
                x86::dots_avx512(&[row; 4], [parts[0]], &mut sums);
                sums.iter().for_each(|sums| near(&sums[..1]));
            }
        }
        if Simd::Avx512.is_there() && is_x86_feature_detected!("avx512bf16") {
            let x: Vec<Vec<bf16>> =
                x.iter().map(|x| x.iter().map(|value| bf16::from_f32(*value)).collect()).collect();
            let arranged: Vec<Vec<bf16>> = x.iter().map(|x| arranged_in_pairs(x)).collect();
            let parts: [&[bf16]; 4] = std::array::from_fn(|index| &arranged[index][..]);
            // With the values of the codes in bf16, and sums in fp64.
            let exact = |x: &[bf16]| -> (f64, f64) {
                let code = |index: usize| codes[index / 2] >> (4 * (1 - index % 2)) & 15;
                let term = |index: usize| {
                    let value = bf16::from_f32(crate::nf4::TABLE[usize::from(code(index))]).to_f64();
                    value * x[index].to_f64() * f64::from(scales[index / BLOCK])
                };
                (0..x.len()).map(term).fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
            };
            let check = |sums: &[f32]| {
                for (sum, x) in sums.iter().zip(&x) {
                    let (expected, size) = exact(x);
                    assert!((f64::from(*sum) - expected).abs() < 1e-6 * size, "{sum}, expected {expected}");
                }
            };
            // SAFETY: the processor has AVX-512 BF16; codes, scales and vectors are of the same blocks.
            unsafe {
                let mut sums = [[0.0; VECTORS]; 4];
                x86::dots_bf16(&[row; 4], parts, &mut sums);
                sums.iter().for_each(|sums| check(sums));
                x86::dots_bf16(&[row; 4], [parts[0], parts[1]], &mut sums);
                sums.iter().for_each(|sums| check(&sums[..2]));
                x86::dots_bf16(&[row; 4], [parts[0]], &mut sums);
                sums.iter().for_each(|sums| check(&sums[..1]));
            }
        }
    }
}
