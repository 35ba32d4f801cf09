//! Dequantization of a window of an NF4 matrix as a CUDA kernel.

use std::ops::Range;

use runtime::profile::kernel;
use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::Tensor;

use super::reference::Reference;
use super::{DequantizePass, Sections, TABLE, expect, nested_map, sections};
use crate::cuda::{Argument, Matrix, Source, are_ready, int, launch, matrix, pointer, type_of};

pub(crate) const SOURCE: Source = Source(include_str!("nf4.cuh"));

const NAME: &str = "nf4";
const THREADS: u32 = 256;
/// Packs of a thread: 16 bytes of the output each.
const PACKS: i64 = 4;

/// The kernel in CUDA C++, and [`Reference`] for addresses that it does not support, and without NVRTC.
pub(super) struct Cuda;

impl DequantizePass for Cuda {
    fn dequantize(&self, weight: &Tensor, window: [Range<i64>; 2], out: &mut Tensor) -> Result<()> {
        let scope = kernel("kernels::nf4::dequantize", [weight]);
        if dequantize(weight, window.clone(), out)? {
            return Ok(());
        }
        drop(scope);
        Reference.dequantize(weight, window, out)
    }
}

/// Writes rows and columns of ŵ into a matrix of their shape in fp32, bf16 or fp16, with the bits of the CPU's pass; returns false if the
/// kernel does not support the tensors.
fn dequantize(weight: &Tensor, window: [Range<i64>; 2], out: &Tensor) -> Result<bool> {
    let device = weight.device();
    let Some(element) = type_of(out.kind()).filter(|_| are_ready(device)) else { return Ok(false) };
    let [height, inner] = expect(weight)?;
    let Matrix { rows, columns, stride } = matrix(NAME, "out", out, (out.kind(), device))?;
    let [row_range, column_range] = &window;
    let fits = |range: &Range<i64>, length: i64, end: i64| {
        range.start >= 0 && range.end <= end && range.end - range.start == length
    };
    if !fits(row_range, rows, height) || !fits(column_range, columns, inner) {
        let reason = format!("rows and columns {window:?} of [{height}, {inner}] into {:?}", out.size());
        return Err(Error::invalid(NAME, reason));
    }
    let Sections { codes, absmax, nested } = sections(weight)?;
    let wide = 16 / out.kind().elt_size_in_bytes() as i64;
    // Codes begin at a multiple of 64 bytes of the weight, which is at a multiple of 4.
    let aligned = (out.data_ptr() as usize).is_multiple_of(16)
        && [inner, column_range.start, columns, stride].iter().all(|number| number % wide == 0);
    let width = if aligned { wide } else { 1 };
    let (row_packs, packs) = (columns / width, rows * (columns / width));
    if !(weight.data_ptr() as usize).is_multiple_of(4) || i32::try_from(packs).is_err() {
        return Ok(false);
    }
    if packs == 0 {
        return Ok(true);
    }
    let [factors, mean] = match &nested {
        Some((factors, mean)) => [pointer(factors), pointer(mean)],
        None => [Argument::Pointer(0), Argument::Pointer(0)],
    };
    let arguments = [
        tables(),
        pointer(&codes),
        pointer(&absmax),
        factors,
        mean,
        Argument::I64(row_range.start * inner + column_range.start),
        Argument::I64(inner),
        int(NAME, "the number of packs in a row", row_packs)?,
        int(NAME, "the number of packs", packs)?,
        pointer(out),
        Argument::I64(stride),
    ];
    let block_packs = i64::from(THREADS) * PACKS;
    let expression = format!("nf4_dequantize<{element}, {width}, {}, {THREADS}, {PACKS}>", nested.is_some());
    launch(SOURCE, &expression, device, ((packs + block_packs - 1) / block_packs, THREADS), &arguments)?;
    bump_version(out)?;
    Ok(true)
}

/// Returns the values of the codes and those of nested scales, two in each word.
fn tables() -> Argument {
    let values: Vec<f32> = TABLE.iter().chain(nested_map()).copied().collect();
    let word =
        |pair: &[f32]| pair.iter().rev().fold(0, |word, value| word << 32 | u64::from(value.to_bits()));
    Argument::Words(values.chunks(2).map(word).collect())
}
