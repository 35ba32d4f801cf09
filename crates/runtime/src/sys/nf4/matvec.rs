//! Products of a few vectors with a weight, which is read once.
//!
//! Vectors in bf16 are multiplied by the processor's own instructions for bf16 where these are used
//! ([`multiplies_into_fp32`]): half as many instructions, with the 16 values of the codes rounded to bf16 and scaled in fp32. What a
//! weight that is dequantized to bf16 has is rounded as often.

use half::bf16;
use tch::{Kind, Tensor};

use super::super::matvec::Results;
use super::super::matvec::streams::{self, Products, STREAMS, VECTORS};
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{BLOCK, BYTES, Choice, Packed, TASK, bytes, choice, expect_shape, packed, portable};
use crate::error::Result;
use crate::nf4::sections;
use crate::processor::multiplies_into_fp32;

/// Returns `x·Ŵᵀ + b` in `kind` if that is bf16, else in fp32. The caller has checked the shapes, that all are on the CPU, and that rows are
/// whole blocks.
pub(crate) fn matvec(x_md: &Tensor, weight: &Tensor, bias: Option<&Tensor>, kind: Kind) -> Result<Tensor> {
    let [height, inner] = expect_shape(weight)?.map(|size| size as usize);
    let vectors = x_md.size()[0] as usize;
    let x_md = x_md.f_contiguous()?;
    let arranged = if x_md.kind() == Kind::BFloat16 && multiplies_into_fp32(Kind::BFloat16) {
        let x: Vec<bf16> = bytes(&x_md).as_chunks().0.iter().map(|two| bf16::from_ne_bytes(*two)).collect();
        Vectors::Pairs(x.chunks_exact(inner).map(arranged_in_pairs).collect())
    } else {
        let wide = x_md.f_to_kind(Kind::Float)?;
        let x: Vec<f32> = bytes(&wide).as_chunks().0.iter().map(|four| f32::from_ne_bytes(*four)).collect();
        Vectors::Float(x.chunks_exact(inner).map(arrange).collect())
    };
    let parts = sections(weight)?;
    let packed = packed(&parts);
    let results = Results::new([vectors, height], kind, bias)?;
    let products = Quantized { packed: &packed, blocks: inner / BLOCK, vectors: arranged.groups() };
    streams::run(&products, &results, TASK / inner)?;
    Ok(results.into_tensor())
}

/// A weight and the vectors, [`VECTORS`] at a time.
struct Quantized<'a> {
    packed: &'a Packed<'a>,
    /// Blocks of a row.
    blocks: usize,
    vectors: Groups<'a>,
}

impl Products for Quantized<'_> {
    /// The first row, and the scales of all rows.
    type Task = (usize, Vec<f32>);

    fn task(&self, first: usize, end: usize) -> Self::Task {
        let mut scales = vec![0f32; (end - first) * self.blocks];
        self.packed.scales(first * self.blocks, &mut scales);
        (first, scales)
    }

    fn of_rows(
        &self,
        (first, scales): &Self::Task,
        rows: [usize; STREAMS],
        number: usize,
    ) -> [[f32; VECTORS]; STREAMS] {
        let mut of_rows = [Row { codes: &[], scales: &[] }; STREAMS];
        for (one, row) in of_rows.iter_mut().zip(rows) {
            one.codes = &self.packed.codes[row * self.blocks * BYTES..][..self.blocks * BYTES];
            one.scales = &scales[(row - first) * self.blocks..][..self.blocks];
        }
        match &self.vectors {
            Groups::Float(groups) => dots(of_rows, &groups[number]),
            Groups::Pairs(groups) => dots_of_pairs(of_rows, &groups[number]),
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

impl Vectors {
    fn groups(&self) -> Groups<'_> {
        match self {
            Self::Float(x) => Groups::Float(x.chunks(VECTORS).map(Group::of).collect()),
            Self::Pairs(x) => Groups::Pairs(x.chunks(VECTORS).map(Group::of).collect()),
        }
    }
}

/// [`VECTORS`] vectors; if there are fewer, the first one fills the rest.
struct Group<'a, T> {
    four: [&'a [T]; VECTORS],
    is_one: bool,
}

impl<'a, T> Group<'a, T> {
    fn of(x: &'a [Vec<T>]) -> Self {
        let four = std::array::from_fn(|index| x.get(index).unwrap_or(&x[0]).as_slice());
        Self { four, is_one: x.len() == 1 }
    }
}

enum Groups<'a> {
    Float(Vec<Group<'a, f32>>),
    Pairs(Vec<Group<'a, bf16>>),
}

fn single(sums: [[f32; 1]; STREAMS]) -> [[f32; VECTORS]; STREAMS] {
    sums.map(|[sum]| [sum, 0.0, 0.0, 0.0])
}

/// Products of rows with vectors that [`arranged_in_pairs`] returned.
#[cfg(target_arch = "x86_64")]
fn dots_of_pairs(rows: [Row<'_>; STREAMS], x: &Group<'_, bf16>) -> [[f32; VECTORS]; STREAMS] {
    // SAFETY: there are such vectors only where the processor has the instructions; codes, scales and vectors are of the same whole
    // blocks.
    unsafe {
        match x.is_one {
            true => single(x86::dots_bf16(rows, [x.four[0]])),
            false => x86::dots_bf16(rows, x.four),
        }
    }
}

/// Nothing multiplies pairs of bf16 there.
#[cfg(not(target_arch = "x86_64"))]
fn dots_of_pairs(_: [Row<'_>; STREAMS], _: &Group<'_, bf16>) -> [[f32; VECTORS]; STREAMS] {
    unreachable!("pairs of bf16 are chosen on x86-64 alone")
}

/// Products of rows with vectors that [`arrange`] returned.
fn dots(rows: [Row<'_>; STREAMS], x: &Group<'_, f32>) -> [[f32; VECTORS]; STREAMS] {
    let (four, one) = (x.four, [x.four[0]]);
    match (choice(), x.is_one) {
        // SAFETY: the processor has the instructions; codes, scales and vectors are of the same whole blocks.
        #[cfg(target_arch = "x86_64")]
        (Choice::Avx512, true) => single(unsafe { x86::dots_avx512(rows, one) }),
        // SAFETY: likewise.
        #[cfg(target_arch = "x86_64")]
        (Choice::Avx512, false) => unsafe { x86::dots_avx512(rows, four) },
        // SAFETY: likewise.
        #[cfg(target_arch = "x86_64")]
        (Choice::Avx2, true) => single(rows.map(|row| unsafe { x86::dots_avx2(row, one) })),
        // SAFETY: likewise.
        #[cfg(target_arch = "x86_64")]
        (Choice::Avx2, false) => rows.map(|row| unsafe { x86::dots_avx2(row, four) }),
        (Choice::Portable, true) => single(rows.map(|row| portable::dots(row, one))),
        (Choice::Portable, false) => rows.map(|row| portable::dots(row, four)),
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
    let count = x.len() / PARTS;
    for (index, some) in x.as_chunks::<PARTS>().0.iter().enumerate() {
        for (part, value) in some.iter().enumerate() {
            out[(part ^ 1) * count + index] = *value;
        }
    }
    out
}
