//! How the values of a tensor lie in a file, where not one after the other.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::Entry;
use crate::error::{Error, Result};

/// The order and the form of a tensor's values in its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Layout {
    /// One after the other.
    Dense,
    /// Of every element the distance from the first value, in elements, is `offset` plus its index times the strides: a part of a tensor that
    /// has others between its own, or is transposed.
    Strided {
        /// Of the first element.
        offset: i64,
        /// Of each dimension.
        strides: Vec<i64>,
    },
    /// A matrix's rows `first`, `first + step`, … in blocks of MXFP4: the range has two values a byte, the low one first, and `scales`, also a
    /// byte range of the file, an exponent of each 32 values: v·2^(scale − 127).
    Mxfp4 {
        /// Of the same rows.
        scales: Range<usize>,
        /// Index of the first row.
        first: usize,
        /// Distance of rows.
        step: usize,
    },
}

/// The values of MXFP4's codes (OCP Microscaling Formats 1.0, FP4 E2M1).
const FP4: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
/// Values of a block, and bytes of their codes.
pub(crate) const MXFP4_BLOCK: [usize; 2] = [32, 16];
/// The exponent of a scale of 1.
const BIAS: i32 = 127;

impl Layout {
    /// Copies an entry's `values` of this layout, with the other bytes of its `file`.
    pub(super) fn copy(&self, values: &[u8], file: &[u8], entry: &Entry, destination: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let copy = match self {
            Self::Dense => return runtime::file::copy_values(values, entry.kind, destination),
            Self::Strided { offset, strides } => {
                let elements = values.len() / entry.kind.elt_size_in_bytes();
                let flat = Tensor::f_from_data_size(values, &[elements as i64], entry.kind)?;
                flat.f_as_strided(&entry.shape, strides, *offset)?
            }
            Self::Mxfp4 { scales, first, step } => {
                let scales = file.get(scales.clone()).unwrap_or_default();
                let [rows, columns] = <[i64; 2]>::try_from(&*entry.shape).unwrap_or_default();
                let numbers = decode(values, scales, (*first, *step), [rows as usize, columns as usize]);
                let numbers = numbers.ok_or_else(|| {
                    let reason = format!("`{}` has other sizes than its scales", entry.name);
                    Error::invalid("MXFP4", reason)
                })?;
                Tensor::f_from_slice(&numbers)?.f_view([rows, columns])?.f_to_kind(entry.kind)?
            }
        };
        destination.shallow_clone().f_copy_(&copy)?;
        Ok(())
    }
}

/// Returns the values of every `step`-th row from `first` on; `None` for bytes of another size.
fn decode(
    codes: &[u8],
    scales: &[u8],
    (first, step): (usize, usize),
    [rows, columns]: [usize; 2],
) -> Option<Vec<f32>> {
    let [values, bytes] = MXFP4_BLOCK;
    let blocks = columns / values;
    let mut decoded = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        let block = (first + row * step) * blocks;
        let codes = codes.get(block * bytes..(block + blocks) * bytes)?;
        let scales = scales.get(block..block + blocks)?;
        for (codes, scale) in codes.chunks_exact(bytes).zip(scales) {
            let factor = 2f32.powi(i32::from(*scale) - BIAS);
            for code in codes {
                decoded.push(FP4[usize::from(code & 15)] * factor);
                decoded.push(FP4[usize::from(code >> 4)] * factor);
            }
        }
    }
    Some(decoded)
}

/// The dtype that MXFP4's values are read in: it holds all of them.
pub(super) const MXFP4_KIND: Kind = Kind::BFloat16;
