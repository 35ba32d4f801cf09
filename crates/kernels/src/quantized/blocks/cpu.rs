//! Dequantization on the CPU: one pass over the blocks, on libtorch's threads.

use std::mem::MaybeUninit;
use std::ops::Range;

use half::bf16;
use runtime::parallel;
use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

#[cfg(target_arch = "x86_64")]
use super::avx512;
use super::chunk::{CHUNK, Chunk, Format, UNIT, chunk_start, with_format};
use super::{BlockType, refuse};
use crate::cpu_tensor::{Output, bytes};
use crate::operands::rows;
#[cfg(target_arch = "x86_64")]
use crate::processor::{Simd, simd};
use crate::simd::{Element, arch};

/// Approximate weights of a task.
pub(super) const TASK: usize = 256 * 1024;
/// The most bytes of a chunk.
const MOST_BYTES: usize = 34 * 8;

/// The rows of a matrix on the CPU.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
}

impl<'a> Rows<'a> {
    pub(super) fn new(weight: &'a Tensor) -> Result<Self> {
        if weight.device() != Device::Cpu || !weight.is_contiguous() {
            let (device, stride) = (weight.device(), weight.stride());
            return Err(refuse(format!(
                "blocks on {device:?} of strides {stride:?}; expected contiguous ones on the CPU"
            )));
        }
        let size = weight.size();
        Ok(Self { bytes: bytes(weight), row_bytes: size[1..].iter().product::<i64>() as usize })
    }

    pub(super) fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_bytes..][..self.row_bytes]
    }
}

/// Memory for the bytes of a chunk that a row does not have.
pub(super) type Padded = MaybeUninit<[u8; MOST_BYTES]>;

/// Returns the bytes of a row's chunk, from [`chunk_start`] on. A row shorter than a chunk is padded in `memory` with blocks of zeros, whose
/// weights are zero.
#[inline(always)]
pub(super) fn chunk_bytes<'a, F: Format>(row: &'a [u8], number: usize, memory: &'a mut Padded) -> &'a [u8] {
    let start = chunk_start(number, F::BYTES, row.len());
    if let Some(bytes) = row.get(start..start + F::BYTES) {
        return bytes;
    }
    let memory = memory.write([0; MOST_BYTES]);
    memory[..row.len()].copy_from_slice(row);
    &memory[..F::BYTES]
}

/// Writes rows and columns of Ŵ into a matrix of their shape in fp32 or bf16.
pub(super) fn dequantize(
    stored: BlockType,
    weight: &Tensor,
    window: [Range<i64>; 2],
    out: &mut Tensor,
) -> Result<()> {
    with_format!(stored, |F| match out.kind() {
        Kind::Float => write::<F, f32>(weight, window, out),
        Kind::BFloat16 => write::<F, bf16>(weight, window, out),
        other => Err(refuse(format!("values in {other:?}; expected Float or BFloat16"))),
    })
}

#[cfg(not(target_arch = "x86_64"))]
use Format as Readable;
#[cfg(target_arch = "x86_64")]
use avx512::Registers as Readable;

fn write<F: Readable, E: Element<Compute = f32>>(
    weight: &Tensor,
    [row_range, columns]: [Range<i64>; 2],
    out: &mut Tensor,
) -> Result<()> {
    let size = weight.size();
    let (height, inner) = (size[0], size[1] * F::TYPE.values() as i64);
    let target = rows("quantized weight", "out", out, (out.kind(), Device::Cpu))?;
    let (count, width) = ((row_range.end - row_range.start) as usize, (columns.end - columns.start) as usize);
    let inside =
        row_range.start >= 0 && row_range.end <= height && columns.start >= 0 && columns.end <= inner;
    if !inside || (target.rows, target.columns) != (count, width) || !out.is_contiguous() {
        let reason =
            format!("rows {row_range:?}, columns {columns:?} of [{height}, {inner}] into {:?}", out.size());
        return Err(Error::invalid("quantized weight", reason));
    }
    bump_version(out)?;
    let from = Rows::new(weight)?;
    let to = Output::<E>::new(out);
    let (first, columns) = (row_range.start as usize, columns.start as usize..columns.end as usize);
    let task_rows = (TASK / width.max(1)).max(1);
    let arch = arch();
    parallel::for_each(count.div_ceil(task_rows), |task| {
        for row in task * task_rows..count.min((task + 1) * task_rows) {
            // SAFETY: the output outlives the call, and each row belongs to one task.
            let out = unsafe { to.range(row * width..(row + 1) * width) };
            let bytes = from.row(first + row);
            #[cfg(target_arch = "x86_64")]
            if simd() == Simd::Avx512 {
                fill::<F, E>(bytes, columns.clone(), out, |bytes, values| {
                    // SAFETY: the processor has AVX-512 F, BW, VL and DQ; there are the bytes of a chunk.
                    unsafe { avx512::values::<F>(bytes, values) }
                });
                continue;
            }
            arch.dispatch(
                #[inline(always)]
                || fill::<F, E>(bytes, columns.clone(), out, portable::<F>),
            );
        }
    })
}

/// Dequantizes some columns of a row chunk by chunk.
#[inline(always)]
fn fill<F: Format, E: Element<Compute = f32>>(
    row: &[u8],
    columns: Range<usize>,
    out: &mut [E],
    read: impl Fn(&[u8], &mut [f32; CHUNK]),
) {
    let (mut at, mut rest) = (columns.start, out);
    let width = row.len() / F::TYPE.bytes() * F::TYPE.values();
    let (mut values, mut memory) = ([0.0; CHUNK], Padded::uninit());
    while !rest.is_empty() {
        let number = at / CHUNK;
        let skipped = at - chunk_start(number, CHUNK, width);
        let (now, later) = rest.split_at_mut(rest.len().min(CHUNK - skipped));
        read(chunk_bytes::<F>(row, number, &mut memory), &mut values);
        for (to, value) in now.iter_mut().zip(&values[skipped..]) {
            *to = E::round(*value);
        }
        at += now.len();
        rest = later;
    }
}

/// Dequantizes a chunk.
#[inline(always)]
fn portable<F: Format>(bytes: &[u8], values: &mut [f32; CHUNK]) {
    let mut chunk = Chunk::EMPTY;
    F::read(bytes, &mut chunk);
    let zero = f32::from(F::ZERO);
    for (unit, values) in values.as_chunks_mut::<UNIT>().0.iter_mut().enumerate() {
        let codes = &chunk.codes[unit * UNIT..][..UNIT];
        for (value, code) in values.iter_mut().zip(codes) {
            *value = chunk.scales[unit] * (f32::from(*code) - zero) - chunk.minima[unit];
        }
    }
}

/// Whatever the processor, in one process: the choices of `FRUGAL_SIMD` test the dispatch.
#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::super::test_bytes;
    use super::*;

    #[test]
    fn every_choice_dequantizes_the_same_bits() {
        for stored in BlockType::ALL {
            with_format!(stored, |F| {
                for seed in 0..8 {
                    let bytes = test_bytes(stored, CHUNK / stored.values(), seed);
                    let (mut expected, mut found) = ([0.0; CHUNK], [0.0; CHUNK]);
                    portable::<F>(&bytes, &mut expected);
                    let bits = |values: &[f32; CHUNK]| values.map(f32::to_bits);
                    if let Some(simd) = pulp::x86::V3::try_new() {
                        pulp::Arch::V3(simd).dispatch(
                            #[inline(always)]
                            || portable::<F>(&bytes, &mut found),
                        );
                        assert_eq!(bits(&found), bits(&expected), "{}", stored.name());
                    }
                    if Simd::Avx512.is_there() {
                        // SAFETY: the processor has AVX-512; the bytes are a chunk.
                        unsafe { avx512::values::<F>(&bytes, &mut found) };
                        assert_eq!(bits(&found), bits(&expected), "{}", stored.name());
                    }
                }
            });
        }
    }
}
