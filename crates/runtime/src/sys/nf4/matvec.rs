//! Products of a few vectors with a weight, which is read once.
//!
//! Vectors in bf16 are multiplied by the processor's own instructions for bf16 where these are used
//! ([`multiplies_into_fp32`]): half as many instructions, with the 16 values of the codes rounded to bf16 and scaled in fp32. What a
//! weight that is dequantized to bf16 has is rounded as often.

use half::bf16;
use tch::{Kind, Tensor};

use super::super::matvec::Results;
use super::super::parallel;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{BLOCK, BYTES, Choice, TASK, choice, expect_shape, packed, portable};
use crate::error::Result;
use crate::nf4::sections;
use crate::processor::multiplies_into_fp32;

/// Vectors that are multiplied at once with the weights that were read.
const VECTORS: usize = 4;
/// Parts of a task's rows that are read in parallel, of each a row at once: sequential streams, which the processor prefetches; of adjacent
/// rows it waited for most of the codes.
const ROWS: usize = 4;

/// Returns `x·Ŵᵀ + b` in `kind` if that is bf16, else in fp32. The caller has checked the shapes, that all are on the CPU, and that rows are
/// whole blocks.
pub(crate) fn matvec(x_md: &Tensor, weight: &Tensor, bias: Option<&Tensor>, kind: Kind) -> Result<Tensor> {
    let [height, inner] = expect_shape(weight)?.map(|size| size as usize);
    let vectors = x_md.size()[0] as usize;
    let x_md = x_md.f_contiguous()?;
    let arranged = if x_md.kind() == Kind::BFloat16 && multiplies_into_fp32(Kind::BFloat16) {
        let mut bits = vec![0i16; vectors * inner];
        x_md.f_view_dtype(Kind::Int16)?.f_copy_data(&mut bits, vectors * inner)?;
        let x: Vec<bf16> = bits.iter().map(|bits| bf16::from_bits(bits.cast_unsigned())).collect();
        Vectors::Pairs(x.chunks_exact(inner).map(arranged_in_pairs).collect())
    } else {
        let mut x = vec![0f32; vectors * inner];
        x_md.f_to_kind(Kind::Float)?.f_copy_data(&mut x, vectors * inner)?;
        Vectors::Float(x.chunks_exact(inner).map(arrange).collect())
    };
    let parts = sections(weight)?;
    let packed = packed(&parts);
    let results = Results::new([vectors, height], kind, bias)?;
    let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1).max(1);
    let of_task = (TASK / inner).min(height.div_ceil(threads)).max(1);
    let blocks = inner / BLOCK;
    parallel::for_each(height.div_ceil(of_task), |task| {
        let mut scales = vec![0f32; ROWS * blocks];
        let first = task * of_task;
        let end = height.min(first + of_task);
        let of_stream = (end - first).div_ceil(ROWS);
        for step in 0..of_stream {
            // The last stream may be shorter: its last row is read again, and those sums are dropped.
            let row = |stream: usize| first + stream * of_stream + step;
            for (stream, scales) in scales.chunks_exact_mut(blocks).enumerate() {
                packed.scales(row(stream).min(end - 1) * blocks, scales);
            }
            let rows: [Row<'_>; ROWS] = std::array::from_fn(|stream| {
                let codes = &packed.codes[row(stream).min(end - 1) * blocks * BYTES..][..blocks * BYTES];
                Row { codes, scales: &scales[stream * blocks..][..blocks] }
            });
            for number in 0..vectors.div_ceil(VECTORS) {
                let sums = arranged.dots(rows, number);
                for vector in 0..VECTORS.min(vectors - number * VECTORS) {
                    for (stream, sums) in sums.iter().enumerate().filter(|(stream, _)| row(*stream) < end) {
                        // SAFETY: both are among the results, and each row of weights belongs to one task.
                        unsafe { results.put(number * VECTORS + vector, row(stream), sums[vector]) };
                    }
                }
            }
        }
    })?;
    Ok(results.into_tensor())
}

/// A row of whole blocks.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [f32],
}

/// Vectors, arranged as the vector instructions read codes.
enum Vectors {
    Float(Vec<Vec<f32>>),
    Pairs(Vec<Vec<bf16>>),
}

impl Vectors {
    /// Products of rows with the `number`-th [`VECTORS`] vectors, or as many as there are.
    fn dots(&self, rows: [Row<'_>; ROWS], number: usize) -> [[f32; VECTORS]; ROWS] {
        let from = number * VECTORS;
        match self {
            Self::Float(x) => dots(rows, &x[from..x.len().min(from + VECTORS)]),
            Self::Pairs(x) => dots_of_pairs(rows, &x[from..x.len().min(from + VECTORS)]),
        }
    }
}

/// Products of rows with up to [`VECTORS`] vectors, as [`arranged_in_pairs`] returns them.
#[cfg(target_arch = "x86_64")]
fn dots_of_pairs(rows: [Row<'_>; ROWS], x: &[Vec<bf16>]) -> [[f32; VECTORS]; ROWS] {
    let four: [&[bf16]; VECTORS] = std::array::from_fn(|index| x.get(index).unwrap_or(&x[0]).as_slice());
    // SAFETY: there are such vectors only where the processor has the instructions; codes, scales and vectors are of the same whole
    // blocks.
    unsafe {
        match x.len() {
            1 => x86::dots_bf16(rows, [four[0]]).map(|[sum]| [sum, 0.0, 0.0, 0.0]),
            _ => x86::dots_bf16(rows, four),
        }
    }
}

/// Nothing multiplies pairs of bf16 there.
#[cfg(not(target_arch = "x86_64"))]
fn dots_of_pairs(_: [Row<'_>; ROWS], _: &[Vec<bf16>]) -> [[f32; VECTORS]; ROWS] {
    unreachable!("pairs of bf16 are chosen on x86-64 alone")
}

/// Products of rows with up to [`VECTORS`] vectors, as [`arrange`] returns them.
fn dots(rows: [Row<'_>; ROWS], x: &[Vec<f32>]) -> [[f32; VECTORS]; ROWS] {
    // If there are fewer vectors than are multiplied at once, the first one fills the rest.
    let four: [&[f32]; VECTORS] = std::array::from_fn(|index| x.get(index).unwrap_or(&x[0]).as_slice());
    let one = [four[0]];
    let single = |sums: [[f32; 1]; ROWS]| sums.map(|[sum]| [sum, 0.0, 0.0, 0.0]);
    match (choice(), x.len()) {
        // SAFETY: the processor has the instructions; codes, scales and vectors are of the same whole blocks.
        #[cfg(target_arch = "x86_64")]
        (Choice::Avx512, 1) => single(unsafe { x86::dots_avx512(rows, one) }),
        // SAFETY: likewise.
        #[cfg(target_arch = "x86_64")]
        (Choice::Avx512, _) => unsafe { x86::dots_avx512(rows, four) },
        // SAFETY: likewise.
        #[cfg(target_arch = "x86_64")]
        (Choice::Avx2, 1) => single(rows.map(|row| unsafe { x86::dots_avx2(row, one) })),
        // SAFETY: likewise.
        #[cfg(target_arch = "x86_64")]
        (Choice::Avx2, _) => rows.map(|row| unsafe { x86::dots_avx2(row, four) }),
        (Choice::Portable, 1) => single(rows.map(|row| portable::dots(row, one))),
        (Choice::Portable, _) => rows.map(|row| portable::dots(row, four)),
    }
}

/// Arranges a vector as the vector instructions read codes: of each word of 32 bits, eight codes, the lowest four bits of all words come
/// first, then the next four bits of all words. The portable products read it as it is.
fn arrange(x: &[f32]) -> Vec<f32> {
    if choice() == Choice::Portable { x.to_vec() } else { arranged(x) }
}

pub(super) fn arranged(x: &[f32]) -> Vec<f32> {
    // Of each byte the high four bits are the first weight.
    (0..8usize).flat_map(|part| x.iter().skip(part ^ 1).step_by(8).copied()).collect()
}

/// Arranges a vector as the instructions for pairs of bf16 read codes: of each 16 bits, four codes, the lowest four bits of all come
/// first.
pub(super) fn arranged_in_pairs(x: &[bf16]) -> Vec<bf16> {
    (0..4usize).flat_map(|part| x.iter().skip(part ^ 1).step_by(4).copied()).collect()
}
