//! Products of a few vectors with a weight, which is read once.

use tch::{Device, Kind, Tensor};

use super::super::parallel;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{BLOCK, BYTES, Choice, Output, TASK, choice, expect_shape, packed, portable};
use crate::error::Result;
use crate::nf4::sections;

/// Vectors that are multiplied at once with the weights that were read.
const VECTORS: usize = 4;
/// Rows that are multiplied at once.
const ROWS: usize = 4;

/// Returns `x·Ŵᵀ` in fp32. The caller has checked the shapes, that both are on the CPU, and that rows are whole blocks.
pub(crate) fn matvec(x_md: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let [height, inner] = expect_shape(weight)?.map(|size| size as usize);
    let x_md = x_md.f_to_kind(Kind::Float)?.f_contiguous()?;
    let vectors = x_md.size()[0] as usize;
    let mut flat = vec![0f32; vectors * inner];
    x_md.f_copy_data(&mut flat, vectors * inner)?;
    let arranged: Vec<Vec<f32>> = flat.chunks_exact(inner).map(arrange).collect();
    let parts = sections(weight)?;
    let packed = packed(&parts);
    let out = Tensor::f_empty([vectors as i64, height as i64], (Kind::Float, Device::Cpu))?;
    let to = Output::<f32>::of(&out);
    let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1).max(1);
    let of_task = (TASK / inner).min(height.div_ceil(threads)).max(1);
    let blocks = inner / BLOCK;
    parallel::for_each(height.div_ceil(of_task), |task| {
        let mut scales = vec![0f32; ROWS * blocks];
        let end = height.min((task + 1) * of_task);
        for first in (task * of_task..end).step_by(ROWS) {
            let count = ROWS.min(end - first);
            packed.scales(first * blocks, &mut scales[..count * blocks]);
            // If fewer rows are left than are multiplied at once, the last one fills the rest.
            let rows: [Row<'_>; ROWS] = std::array::from_fn(|index| {
                let index = index.min(count - 1);
                let codes = &packed.codes[(first + index) * blocks * BYTES..][..blocks * BYTES];
                Row { codes, scales: &scales[index * blocks..][..blocks] }
            });
            for (number, some) in arranged.chunks(VECTORS).enumerate() {
                let sums = dots(rows, some);
                for vector in 0..some.len() {
                    let place = (number * VECTORS + vector) * height + first;
                    // SAFETY: the output outlives the call, and each row of weights belongs to one task.
                    let out = unsafe { to.range(place..place + count) };
                    for (out, sums) in out.iter_mut().zip(&sums) {
                        *out = sums[vector];
                    }
                }
            }
        }
    })?;
    Ok(out)
}

/// A row of whole blocks.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [f32],
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
