//! Products of a few vectors with a matrix in blocks, which is read once.

#[cfg(target_arch = "x86_64")]
use half::bf16;
use pulp::Simd;
use runtime::Result;
use tch::{Kind, Tensor};

use super::BlockType;
use super::chunk::{CHUNK, Chunk, UNIT, UNITS, chunks, with_format};
use super::cpu::{Padded, Rows, TASK, chunk_bytes};
#[cfg(target_arch = "x86_64")]
use super::{
    integers::{self, Integers},
    words::{self, Words},
};
use crate::cpu_tensor::bytes;
use crate::matvec::Results;
use crate::matvec::streams::{self, Products, STREAMS, Sums, VECTORS};

/// A type of blocks that every implementation reads.
#[cfg(not(target_arch = "x86_64"))]
pub(super) use super::chunk::Format as Readable;

/// A type of blocks that every implementation reads.
#[cfg(target_arch = "x86_64")]
pub(super) trait Readable: super::avx2::Registers + super::avx512::Registers {}

#[cfg(target_arch = "x86_64")]
impl<F: super::avx2::Registers + super::avx512::Registers> Readable for F {}

/// Returns `x·Ŵᵀ + b` in `kind` if that is bf16, else in fp32. The caller has checked the shapes, and that all are on the CPU.
pub(in crate::quantized) fn matvec(
    stored: BlockType,
    x_md: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    kind: Kind,
) -> Result<Tensor> {
    let rows = Rows::new(weight)?;
    let results = Results::new([x_md.size()[0] as usize, weight.size()[0] as usize], kind, bias)?;
    with_format!(stored, |F| multiply::<F>(x_md, rows, &results))?;
    Ok(results.into_tensor())
}

fn multiply<F: Readable>(x_md: &Tensor, rows: Rows<'_>, results: &Results) -> Result<()> {
    let inner = x_md.size()[1] as usize;
    // A tensor may be a lazily negated view.
    let x_md = x_md.f_resolve_neg()?;
    let task_rows = TASK / inner;
    #[cfg(target_arch = "x86_64")]
    if x_md.kind() == Kind::BFloat16 && words::are_used() {
        let x_md = x_md.f_contiguous()?;
        let x: Vec<bf16> = bytes(&x_md).as_chunks().0.iter().map(|two| bf16::from_ne_bytes(*two)).collect();
        let x = x.chunks_exact(inner);
        let format = std::marker::PhantomData::<F>;
        if integers::are_used() {
            let x = x.map(Integers::new::<F>).collect();
            return streams::run(&Quantized { rows, x, format }, results, task_rows);
        }
        let x = x.map(Words::new).collect();
        return streams::run(&Quantized { rows, x, format }, results, task_rows);
    }
    let x_md = x_md.f_to_kind(Kind::Float)?.f_contiguous()?;
    let x: Vec<f32> = bytes(&x_md).as_chunks().0.iter().map(|four| f32::from_ne_bytes(*four)).collect();
    let x = x.chunks_exact(inner).map(Float::new).collect();
    streams::run(&Quantized::<F, Float> { rows, x, format: std::marker::PhantomData }, results, task_rows)
}

/// A weight and the vectors.
struct Quantized<'a, F, X> {
    rows: Rows<'a>,
    x: Vec<X>,
    format: std::marker::PhantomData<F>,
}

impl<F: Readable, X: Vector> Products for Quantized<'_, F, X> {
    type Task = ();

    fn task(&self, _: usize, _: usize) {}

    #[inline(always)]
    fn multiply<S: Simd>(&self, _: S, (): &(), rows: [usize; STREAMS], number: usize, sums: &mut Sums) {
        let rows = rows.map(|row| self.rows.row(row));
        let x = &self.x[number * VECTORS..self.x.len().min((number + 1) * VECTORS)];
        match x.len() {
            1 => X::dots::<F, 1>(rows, [&x[0]], sums),
            2 => X::dots::<F, 2>(rows, [&x[0], &x[1]], sums),
            // If fewer vectors are left than are multiplied at once, the first one fills the rest.
            _ => {
                X::dots::<F, VECTORS>(rows, std::array::from_fn(|index| x.get(index).unwrap_or(&x[0])), sums)
            }
        }
    }
}

/// A vector as products read it.
pub(super) trait Vector: Sized + Sync {
    /// Multiplies four rows with N vectors.
    fn dots<F: Readable, const N: usize>(rows: [&[u8]; STREAMS], x: [&Self; N], sums: &mut Sums);
}

/// A vector in fp32 in chunks, and the sum of each unit.
pub(super) struct Float {
    values: Vec<[f32; CHUNK]>,
    sums: Vec<[f32; UNITS]>,
}

impl Float {
    pub(super) fn new(x: &[f32]) -> Self {
        let values: Vec<_> = chunks(x).collect();
        let sum =
            |values: &[f32; CHUNK]| std::array::from_fn(|unit| values[unit * UNIT..][..UNIT].iter().sum());
        Self { sums: values.iter().map(sum).collect(), values }
    }
}

impl Vector for Float {
    #[inline(always)]
    fn dots<F: Readable, const N: usize>(rows: [&[u8]; STREAMS], x: [&Self; N], sums: &mut Sums) {
        for (row, sums) in rows.into_iter().zip(sums) {
            add::<F, N>(row, x, sums);
        }
    }
}

/// Multiplies a row with N vectors, in eight sums each.
#[inline(always)]
fn add<F: Readable, const N: usize>(row: &[u8], x: [&Float; N], out: &mut [f32; VECTORS]) {
    const LANES: usize = 8;
    let mut sums = [[0f32; LANES]; N];
    let mut minima = [0f32; N];
    let (mut chunk, mut memory) = (Chunk::EMPTY, Padded::uninit());
    let zero = f32::from(F::ZERO);
    for number in 0..x[0].values.len() {
        F::read(chunk_bytes::<F>(row, number, &mut memory), &mut chunk);
        for (unit, codes) in chunk.codes.as_chunks::<UNIT>().0.iter().enumerate() {
            let codes = codes.map(|code| f32::from(code) - zero);
            let scale = chunk.scales[unit];
            for vector in 0..N {
                let x = &x[vector].values[number].as_chunks::<UNIT>().0[unit];
                for lane in 0..LANES {
                    sums[vector][lane] +=
                        scale * (codes[lane] * x[lane] + codes[lane + LANES] * x[lane + LANES]);
                }
            }
            if F::HAS_MINIMA {
                for vector in 0..N {
                    minima[vector] += chunk.minima[unit] * x[vector].sums[number][unit];
                }
            }
        }
    }
    for vector in 0..N {
        out[vector] = sums[vector].iter().sum::<f32>() - minima[vector];
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_bytes;
    use super::*;
    #[cfg(target_arch = "x86_64")]
    use crate::processor::Simd;

    /// Sums of either kind of vector against fp64, also with a chunk that is not whole.
    #[test]
    fn products_with_codes_are_those_of_the_dequantized_row() {
        for stored in BlockType::ALL {
            let blocks = 2 * CHUNK / stored.values() + if stored.values() < CHUNK { 3 } else { 0 };
            let width = blocks * stored.values();
            let rows: Vec<Vec<u8>> = (0..4).map(|seed| test_bytes(stored, blocks, seed)).collect();
            let x: Vec<Vec<bf16>> = (0..VECTORS)
                .map(|vector| {
                    (0..width)
                        .map(|at| bf16::from_f32(((at * 37 + vector * 11) % 101) as f32 / 50.0 - 1.0))
                        .collect()
                })
                .collect();
            let tensor = super::super::from_bytes(stored, [4, width as i64], &rows.concat()).unwrap();
            let dense = crate::quantized::dequantize(&tensor, Kind::Double).unwrap();
            let dense: Vec<f64> = Vec::try_from(dense.view([-1])).unwrap();
            let rows: [&[u8]; STREAMS] = std::array::from_fn(|row| &rows[row][..]);
            let check = |sums: &Sums, vectors: usize, tolerance: f64| {
                for row in 0..STREAMS {
                    for vector in 0..vectors {
                        let term = |at: usize| dense[row * width + at] * x[vector][at].to_f64();
                        let (expected, size) = (0..width)
                            .fold((0.0, 0.0), |(sum, size), at| (sum + term(at), size + term(at).abs()));
                        let found = f64::from(sums[row][vector]);
                        assert!(
                            (found - expected).abs() < tolerance * size,
                            "{}: {found}, {expected}",
                            stored.name()
                        );
                    }
                }
            };
            let float: Vec<Float> =
                x.iter().map(|x| Float::new(&x.iter().map(|x| x.to_f32()).collect::<Vec<_>>())).collect();
            let mut sums = [[0.0; VECTORS]; STREAMS];
            with_format!(stored, |F| {
                Float::dots::<F, VECTORS>(rows, std::array::from_fn(|index| &float[index]), &mut sums);
                check(&sums, VECTORS, 2e-6);
                Float::dots::<F, 1>(rows, [&float[0]], &mut sums);
                check(&sums, 1, 2e-6);
                #[cfg(target_arch = "x86_64")]
                if Simd::Avx2.is_there() {
                    let words: Vec<Words> = x.iter().map(|x| Words::new(x)).collect();
                    Words::dots::<F, VECTORS>(rows, std::array::from_fn(|index| &words[index]), &mut sums);
                    check(&sums, VECTORS, 1e-4);
                    Words::dots::<F, 1>(rows, [&words[0]], &mut sums);
                    check(&sums, 1, 1e-4);
                }
                #[cfg(target_arch = "x86_64")]
                if integers::are_there() {
                    let integers: Vec<Integers> = x.iter().map(|x| Integers::new::<F>(x)).collect();
                    Integers::dots::<F, VECTORS>(
                        rows,
                        std::array::from_fn(|index| &integers[index]),
                        &mut sums,
                    );
                    check(&sums, VECTORS, 1e-4);
                    Integers::dots::<F, 1>(rows, [&integers[0]], &mut sums);
                    check(&sums, 1, 1e-4);
                }
            });
        }
    }
}
