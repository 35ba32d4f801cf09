//! Dequantization by libtorch's operators, on any device.

use std::ops::Range;

use runtime::Result;
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use super::{BLOCK, DequantizePass, NESTED_BLOCK, Sections, TABLE, expect, nested_map, sections};

/// libtorch's operators.
pub(super) struct Reference;

impl DequantizePass for Reference {
    fn dequantize(&self, weight: &Tensor, window: [Range<i64>; 2], out: &mut Tensor) -> Result<()> {
        Ok(out.f_copy_(&self::window(weight, window)?)?)
    }
}

/// Returns a window of rows and columns of ŵ in fp32.
fn window(weight: &Tensor, [rows, columns]: [Range<i64>; 2]) -> Result<Tensor> {
    let [out, inner] = expect(weight)?;
    let parts = sections(weight)?;
    let (height, width) = (rows.end - rows.start, columns.end - columns.start);
    if height == 0 || width == 0 {
        return Ok(Tensor::f_empty([height, width], (Kind::Float, weight.device()))?);
    }
    // Whole bytes: `in` is even, so a row begins with one.
    let (begin, end) = (columns.start / 2, (columns.end + 1) / 2);
    let codes = parts.codes.f_view([out, inner / 2])?.f_narrow(0, rows.start, height)?;
    let codes = codes.f_narrow(1, begin, end - begin)?;
    let pairs = [codes.try_bitwise_right_shift_tensor_scalar(4)?, codes.try_bitwise_and(15)?];
    let index = Tensor::f_stack(&pairs, 2)?.f_view([height, 2 * (end - begin)])?;
    let index = index.f_narrow(1, columns.start - 2 * begin, width)?.f_reshape([-1])?.f_to_kind(Kind::Int)?;
    let values = Tensor::f_from_slice(&TABLE)?.f_to_device(weight.device())?.f_index_select(0, &index)?;
    let first = (rows.start * inner + columns.start) / BLOCK;
    let last = ((rows.end - 1) * inner + columns.end - 1) / BLOCK;
    let options = (Kind::Int64, weight.device());
    let row_starts =
        Tensor::try_arange_start(rows.start, rows.end, options)?.try_mul_scalar(inner)?.f_unsqueeze(1)?;
    let element = Tensor::try_arange_start(columns.start, columns.end, options)?.f_add(&row_starts)?;
    let block = element.try_floor_divide_scalar(BLOCK)?.try_sub_scalar(first)?.f_view([-1])?;
    let scales = scales(&parts, first..last + 1)?.f_index_select(0, &block)?;
    Ok(values.f_mul(&scales)?.f_view([height, width])?)
}

/// Returns the scales of some blocks in fp32.
fn scales(parts: &Sections, blocks: Range<i64>) -> Result<Tensor> {
    let length = blocks.end - blocks.start;
    let Some((factors, offset)) = &parts.nested else {
        let bytes = parts.absmax.f_narrow(0, 4 * blocks.start, 4 * length)?;
        return float(&bytes);
    };
    let device = parts.absmax.device();
    let index = parts.absmax.f_narrow(0, blocks.start, length)?.f_to_kind(Kind::Int)?;
    let values = Tensor::f_from_slice(nested_map())?.f_to_device(device)?.f_index_select(0, &index)?;
    let group = Tensor::try_arange_start(blocks.start, blocks.end, (Kind::Int64, device))?
        .try_floor_divide_scalar(NESTED_BLOCK)?;
    let factors = float(factors)?.f_index_select(0, &group)?;
    Ok(values.f_mul(&factors)?.f_add(&float(offset)?)?)
}

/// Reads bytes, which may be at any address, as fp32.
fn float(bytes: &Tensor) -> Result<Tensor> {
    let mut packed = bytes.f_empty_like()?;
    packed.f_copy_(bytes)?;
    Ok(packed.f_view_dtype(Kind::Float)?)
}

#[cfg(test)]
mod tests {
    use tch::kind;

    use super::*;
    use crate::nf4::{Scales, quantize};
    use crate::quantized::dequantize;

    /// The same bits as the kernels, also for windows that begin within a block or a byte.
    #[test]
    fn operators_and_kernels_agree_bit_for_bit() {
        for (shape, scales) in
            [([96i64, 128i64], Scales::Nested), ([37, 22], Scales::Float), ([301, 86], Scales::Nested)]
        {
            let weight = Tensor::randn(shape, kind::FLOAT_CPU);
            let stored = quantize(&weight, scales).unwrap();
            let whole = dequantize(&stored, Kind::Float).unwrap();
            for rows in [0..shape[0], 1..4, 5..shape[0] - 1, 2..2] {
                for columns in [0..shape[1], 0..2, 1..shape[1], 3..12, 7..8] {
                    let expected = whole.narrow(0, rows.start, rows.end - rows.start);
                    let expected = expected.narrow(1, columns.start, columns.end - columns.start);
                    let found = window(&stored, [rows.clone(), columns]).unwrap();
                    assert_eq!(found, expected, "{shape:?}");
                }
            }
        }
    }
}
