//! Products of a few vectors with a weight, which is read once.
//!
//! Vectors in bf16 are multiplied by the processor's own instructions where these are used ([`Bf16Instructions`]): by AMX's (`amx`),
//! or by the one for pairs of bf16: half as many instructions, with the 16 values of the codes rounded to bf16 and scaled in fp32. So each
//! weight is rounded once, as when it is dequantized to bf16.

use half::bf16;
use pulp::Simd;
use runtime::Result;
use tch::{Kind, Tensor};

use super::{BLOCK, BYTES, Choice, Packed, TASK, bytes, choice, expect_shape, packed, portable};
#[cfg(target_arch = "x86_64")]
use super::{amx, x86};
use crate::matvec::Results;
use crate::matvec::streams::{self, Products, STREAMS, Sums, VECTORS};
use crate::processor::{Bf16Instructions, bf16_instructions};
use crate::simd::arch;

/// Returns `x·Ŵᵀ + b` in `kind` if that is bf16, else in fp32. The caller has checked the shapes, that all are on the CPU, and that rows are
/// whole blocks.
pub(crate) fn matvec(x_md: &Tensor, weight: &Tensor, bias: Option<&Tensor>, kind: Kind) -> Result<Tensor> {
    let [height, inner] = expect_shape(weight)?.map(|size| size as usize);
    let vectors = x_md.size()[0] as usize;
    let instructions = bf16_instructions().filter(|instructions| match instructions {
        Bf16Instructions::Pairs => x_md.kind() == Kind::BFloat16,
        #[cfg(target_arch = "x86_64")]
        Bf16Instructions::Tiles => x_md.kind() == Kind::BFloat16 && amx::applies(vectors, height),
        #[cfg(not(target_arch = "x86_64"))]
        Bf16Instructions::Tiles => false,
    });
    // A tensor may be a lazily negated view.
    let x_md = x_md.f_resolve_neg()?;
    let x_md =
        x_md.f_to_kind(if instructions.is_some() { Kind::BFloat16 } else { Kind::Float })?.f_contiguous()?;
    let x = bytes(&x_md);
    let x = if instructions.is_some() {
        let x: Vec<bf16> = x.as_chunks().0.iter().map(|two| bf16::from_ne_bytes(*two)).collect();
        #[cfg(target_arch = "x86_64")]
        if instructions == Some(Bf16Instructions::Tiles) {
            let results = Results::new([vectors, height], kind, bias)?;
            amx::run(&packed(weight)?, &x, inner, &results)?;
            return Ok(results.into_tensor());
        }
        Vectors::Pairs(x.chunks_exact(inner).map(arranged_in_pairs).collect())
    } else {
        let x: Vec<f32> = x.as_chunks().0.iter().map(|four| f32::from_ne_bytes(*four)).collect();
        Vectors::Float(x.chunks_exact(inner).map(arrange).collect())
    };
    let packed = packed(weight)?;
    let results = Results::new([vectors, height], kind, bias)?;
    let products = Quantized { packed: &packed, blocks: inner / BLOCK, x };
    streams::run(&products, &results, TASK / inner)?;
    Ok(results.into_tensor())
}

/// A weight and the vectors.
struct Quantized<'a> {
    packed: &'a Packed<'a>,
    /// Blocks of a row.
    blocks: usize,
    x: Vectors,
}

impl Products for Quantized<'_> {
    /// The first row, and the scales of all rows.
    type Task = (usize, Vec<f32>);

    fn task(&self, first: usize, end: usize) -> Self::Task {
        let mut scales = vec![0f32; (end - first) * self.blocks];
        self.packed.scales(first * self.blocks, &mut scales);
        (first, scales)
    }

    #[inline(always)]
    fn multiply<S: Simd>(
        &self,
        _: S,
        (first, scales): &Self::Task,
        rows: [usize; STREAMS],
        number: usize,
        sums: &mut Sums,
    ) {
        let mut streams = [Row { codes: &[], scales: &[] }; STREAMS];
        for (one, row) in streams.iter_mut().zip(rows) {
            one.codes = &self.packed.codes[row * self.blocks * BYTES..][..self.blocks * BYTES];
            one.scales = &scales[(row - first) * self.blocks..][..self.blocks];
        }
        match &self.x {
            Vectors::Float(x) => dots(&streams, group(x, number), sums),
            Vectors::Pairs(x) => dots_of_pairs(&streams, group(x, number), sums),
        }
    }
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

/// Returns the `number`-th [`VECTORS`] vectors.
fn group<T>(x: &[Vec<T>], number: usize) -> &[Vec<T>] {
    &x[number * VECTORS..x.len().min((number + 1) * VECTORS)]
}

/// N vectors; if fewer are given, the first one fills the rest.
fn filled<T, const N: usize>(x: &[Vec<T>]) -> [&[T]; N] {
    std::array::from_fn(|index| x.get(index).unwrap_or(&x[0]).as_slice())
}

/// Products of rows with vectors that [`arranged_in_pairs`] returned; as many rows at a time as fit the registers.
#[cfg(target_arch = "x86_64")]
fn dots_of_pairs(rows: &[Row<'_>; STREAMS], x: &[Vec<bf16>], sums: &mut Sums) {
    // SAFETY: there are such vectors only where the processor has the instructions; codes, scales and vectors are of the same whole
    // blocks.
    unsafe {
        match x.len() {
            1 => x86::dots_bf16::<STREAMS, 1>(rows, filled(x), sums),
            2 => x86::dots_bf16::<STREAMS, 2>(rows, filled(x), sums),
            _ => {
                for (rows, sums) in rows.as_chunks::<2>().0.iter().zip(sums.as_chunks_mut().0) {
                    x86::dots_bf16::<2, VECTORS>(rows, filled(x), sums);
                }
            }
        }
    }
}

/// Nothing multiplies pairs of bf16 there.
#[cfg(not(target_arch = "x86_64"))]
fn dots_of_pairs(_: &[Row<'_>; STREAMS], _: &[Vec<bf16>], _: &mut Sums) {
    unreachable!("pairs of bf16 are chosen on x86-64 alone")
}

/// Products of rows with vectors that [`arrange`] returned.
fn dots(rows: &[Row<'_>; STREAMS], x: &[Vec<f32>], sums: &mut Sums) {
    match x.len() {
        1 => dots_of::<STREAMS, 1>(rows, filled(x), sums),
        _ => {
            for (rows, sums) in rows.as_chunks::<2>().0.iter().zip(sums.as_chunks_mut().0) {
                dots_of::<2, VECTORS>(rows, filled(x), sums);
            }
        }
    }
}

fn dots_of<const R: usize, const N: usize>(
    rows: &[Row<'_>; R],
    x: [&[f32]; N],
    sums: &mut [[f32; VECTORS]; R],
) {
    match choice() {
        // SAFETY: the processor has the instructions; codes, scales and vectors are of the same whole blocks.
        #[cfg(target_arch = "x86_64")]
        Choice::Avx512 => unsafe { x86::dots_avx512(rows, x, sums) },
        // SAFETY: likewise.
        #[cfg(target_arch = "x86_64")]
        Choice::Avx2 => rows.iter().zip(sums).for_each(|(row, sums)| unsafe { x86::dots_avx2(row, x, sums) }),
        Choice::Portable => rows.iter().zip(sums).for_each(|(row, sums)| portable::dots(row, x, sums)),
    }
}

/// Arranges a vector as the vector instructions read codes: of each word of 32 bits, eight codes, the lowest four bits of all words come
/// first, then the next four bits of all words. The portable products read it as it is.
fn arrange(x: &[f32]) -> Vec<f32> {
    if choice() == Choice::Portable { x.to_vec() } else { arranged(x) }
}

pub(super) fn arranged(x: &[f32]) -> Vec<f32> {
    in_parts::<f32, 8>(x)
}

/// Arranges a vector as the instructions for pairs of bf16 read codes: of each 16 bits, four codes, the lowest four bits of all come
/// first.
pub(super) fn arranged_in_pairs(x: &[bf16]) -> Vec<bf16> {
    in_parts::<bf16, 4>(x)
}

/// The first of each `PARTS` elements that follow each other, then the second ones, and so on. Of each byte the high four bits are the first
/// weight.
fn in_parts<T: Copy + Default, const PARTS: usize>(x: &[T]) -> Vec<T> {
    let mut out = vec![T::default(); x.len()];
    let (some, _) = x.as_chunks::<PARTS>();
    arch().dispatch(
        #[inline(always)]
        || {
            for (part, out) in out.chunks_exact_mut(some.len().max(1)).enumerate() {
                for (to, some) in out.iter_mut().zip(some) {
                    *to = some[part ^ 1];
                }
            }
        },
    );
    out
}
