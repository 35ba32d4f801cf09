//! Dequantization by libtorch's operators, on any device.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::{BLOCK, NESTED_BLOCK, Sections, TABLE, expect, nested_map, sections};
use crate::error::Result;

/// Returns rows of ŵ in fp32.
pub(super) fn rows(weight: &Tensor, rows: Range<i64>) -> Result<Tensor> {
    let [_, inner] = expect(weight)?;
    let parts = sections(weight)?;
    let (start, elements) = (rows.start * inner, (rows.end - rows.start) * inner);
    // `in` is even, so a row begins with a byte.
    let codes = parts.codes.f_narrow(0, start / 2, elements / 2)?;
    let pairs = [codes.f_bitwise_right_shift_tensor_scalar(4)?, codes.f_bitwise_and(15)?];
    let index = Tensor::f_stack(&pairs, 1)?.f_view([-1])?.f_to_kind(Kind::Int)?;
    let values = Tensor::f_from_slice(&TABLE)?.f_to_device(weight.device())?.f_index_select(0, &index)?;
    let (first, end) = (start / BLOCK, (start + elements + BLOCK - 1) / BLOCK);
    let scales = scales(&parts, first..end)?.f_unsqueeze(1)?.f_expand([-1, BLOCK], false)?.f_reshape([-1])?;
    let scales = scales.f_narrow(0, start - first * BLOCK, elements)?;
    Ok(values.f_mul(&scales)?.f_view([rows.end - rows.start, inner])?)
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
    let group = Tensor::f_arange_start(blocks.start, blocks.end, (Kind::Int64, device))?
        .f_floor_divide_scalar(NESTED_BLOCK)?;
    let factors = float(factors)?.f_index_select(0, &group)?;
    Ok(values.f_mul(&factors)?.f_add(&float(offset)?)?)
}

/// Reads bytes, which may be at any address, as fp32.
fn float(bytes: &Tensor) -> Result<Tensor> {
    let mut own = bytes.f_empty_like()?;
    own.f_copy_(bytes)?;
    Ok(own.f_view_dtype(Kind::Float)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nf4::{Scales, dequantize, quantize};
    use tch::kind;

    /// The same bits as the kernels, also for rows that begin within a block.
    #[test]
    fn operators_and_kernels_agree_bit_for_bit() {
        for (shape, scales) in
            [([96i64, 128i64], Scales::Nested), ([37, 22], Scales::Float), ([301, 86], Scales::Nested)]
        {
            let weight = Tensor::randn(shape, kind::FLOAT_CPU);
            let stored = quantize(&weight, scales).unwrap();
            let whole = dequantize(&stored, Kind::Float).unwrap();
            for range in [0..shape[0], 1..4, 5..shape[0] - 1] {
                let expected = whole.narrow(0, range.start, range.end - range.start);
                assert_eq!(rows(&stored, range).unwrap(), expected, "{shape:?}");
            }
        }
    }
}
