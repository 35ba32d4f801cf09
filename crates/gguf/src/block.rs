//! ggml's blocks: consecutive values of a row that share scales, and are stored together.
//!
//! A block of n values holds small integers q and its scales, so that a value is d·q, or d·q − m where the smallest value is stored, too.
//! The K-quants have 256 values in groups of 16 or 32, whose own scales are integers of 4 to 8 bits, multiples of one f16 per block.
//!
//! | type | values | bytes | bits a value | a value |
//! |---|---|---|---|---|
//! | q4_0, q5_0, q8_0 | 32 | 18, 22, 34 | 4.5, 5.5, 8.5 | d·(q − 8), d·(q − 16), d·q |
//! | q4_1, q5_1 | 32 | 20, 24 | 5, 6 | d·q + m |
//! | q2_K, q4_K, q5_K | 256 | 84, 144, 176 | 2.625, 4.5, 5.5 | d·s·q − m·t, with integers s and t for each 16 (q2_K) or 32 values |
//! | q3_K, q6_K | 256 | 110, 210 | 3.4375, 6.5625 | d·s·(q − 4), d·s·(q − 32), with s for each 16 values |
//! | iq4_nl, iq4_xs | 32, 256 | 18, 136 | 4.5, 4.25 | d·T\[q\], d·s·T\[q\], with the 16 values T and s for each 32 values |
//! | mxfp4 | 32 | 17 | 4.25 | 2^e·F\[q\], with the 16 values F of E2M1 |
//!
//! [`dequantize`] gives the bits of ggml's reference and of the Python package `gguf`: products in fp32, without fused multiply-add.
//! [`quantize`] gives the bytes of ggml's reference.
//!
//! ```
//! use gguf::{TensorType, block};
//!
//! // d = 0.5 as f16, then q = 8 + 1 for the first half of the values and 8 − 8 for the second.
//! let bytes = [&[0x00, 0x38][..], &[0x09; 16]].concat();
//! let mut values = [0.0; 32];
//! block::dequantize(TensorType::Q4_0, &bytes, &mut values);
//! assert_eq!((values[0], values[15], values[16]), (0.5, 0.5, -4.0));
//! ```
//!
//! Source: ggml's `ggml-common.h` and `ggml-quants.c`; `gguf/quants.py` 0.19.

mod dequantize_32;
mod dequantize_k;
mod quantize_32;
mod quantize_k;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::tensor_type::TensorType;

/// The values of iq4_nl and iq4_xs.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The values of mxfp4, doubled. The second zero is positive, as in ggml.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Half of mxfp4's scale 2^(e − 127), since the table is doubled. Below 2^-126 it is subnormal.
fn half_scale(exponent: u8) -> f32 {
    match u32::from(exponent) {
        e @ 0..2 => f32::from_bits(0x0020_0000 << e),
        e => f32::from_bits((e - 1) << 23),
    }
}

/// Decodes whole blocks to fp32. The bytes may start anywhere in memory.
///
/// # Panics
/// If `bytes` are not whole blocks, or `values` is not as long as the values of these blocks.
pub fn dequantize(kind: TensorType, bytes: &[u8], values: &mut [f32]) {
    let blocks = bytes.len() / kind.block_bytes();
    assert!(
        bytes.len() == blocks * kind.block_bytes() && values.len() == blocks * kind.block_values(),
        "{} bytes of {kind} for {} values",
        bytes.len(),
        values.len()
    );
    match kind {
        TensorType::F32 => each(bytes, values, |x, [y]| *y = f32::from_le_bytes(*x)),
        TensorType::F16 => halves(bytes, values),
        TensorType::BF16 => each(bytes, values, |x, [y]| *y = bf16::from_le_bytes(*x).to_f32()),
        TensorType::Q4_0 => each(bytes, values, dequantize_32::q4_0),
        TensorType::Q4_1 => each(bytes, values, dequantize_32::q4_1),
        TensorType::Q5_0 => each(bytes, values, dequantize_32::q5_0),
        TensorType::Q5_1 => each(bytes, values, dequantize_32::q5_1),
        TensorType::Q8_0 => each(bytes, values, dequantize_32::q8_0),
        TensorType::Q2K => each(bytes, values, dequantize_k::q2_k),
        TensorType::Q3K => each(bytes, values, dequantize_k::q3_k),
        TensorType::Q4K => each(bytes, values, dequantize_k::q4_k),
        TensorType::Q5K => each(bytes, values, dequantize_k::q5_k),
        TensorType::Q6K => each(bytes, values, dequantize_k::q6_k),
        TensorType::IQ4NL => each(bytes, values, dequantize_32::iq4_nl),
        TensorType::IQ4XS => each(bytes, values, dequantize_k::iq4_xs),
        TensorType::MXFP4 => each(bytes, values, dequantize_32::mxfp4),
    }
}

/// Encodes whole blocks as ggml's reference does without an importance matrix.
///
/// Floats are rounded to the nearest, ties to even. The bytes of blocks are ggml's, except where the inverse of a scale overflows, which
/// ggml leaves undefined: there a value is zero.
///
/// # Panics
/// If `values` are not whole blocks, if `bytes` is not as long as these blocks, or for a type that is not in [`TensorType::WRITTEN`].
pub fn quantize(kind: TensorType, values: &[f32], bytes: &mut [u8]) {
    let blocks = values.len() / kind.block_values();
    assert!(
        bytes.len() == blocks * kind.block_bytes() && values.len() == blocks * kind.block_values(),
        "{} values for {} bytes of {kind}",
        values.len(),
        bytes.len()
    );
    match kind {
        TensorType::F32 => put_each(values, bytes, |[x], y| *y = x.to_le_bytes()),
        TensorType::F16 => put_each(values, bytes, |[x], y| *y = f16::from_f32(*x).to_le_bytes()),
        TensorType::BF16 => put_each(values, bytes, |[x], y| *y = bf16::from_f32(*x).to_le_bytes()),
        TensorType::Q4_0 => put_each(values, bytes, quantize_32::q4_0),
        TensorType::Q4_1 => put_each(values, bytes, quantize_32::q4_1),
        TensorType::Q5_0 => put_each(values, bytes, quantize_32::q5_0),
        TensorType::Q5_1 => put_each(values, bytes, quantize_32::q5_1),
        TensorType::Q8_0 => put_each(values, bytes, quantize_32::q8_0),
        TensorType::Q4K => put_each(values, bytes, quantize_k::q4_k),
        TensorType::Q5K => put_each(values, bytes, quantize_k::q5_k),
        TensorType::Q6K => put_each(values, bytes, quantize_k::q6_k),
        TensorType::MXFP4 => put_each(values, bytes, quantize_32::mxfp4),
        TensorType::Q2K | TensorType::Q3K | TensorType::IQ4NL | TensorType::IQ4XS => {
            panic!("{kind} can be read but not written")
        }
    }
}

/// Calls a function with each block, of `B` bytes, and with the place for its `V` values.
fn each<const B: usize, const V: usize>(
    bytes: &[u8],
    values: &mut [f32],
    decode: impl Fn(&[u8; B], &mut [f32; V]),
) {
    for (block, values) in bytes.as_chunks().0.iter().zip(values.as_chunks_mut().0) {
        decode(block, values);
    }
}

/// Calls a function with the `V` values of each block, and with the place for its `B` bytes.
fn put_each<const V: usize, const B: usize>(
    values: &[f32],
    bytes: &mut [u8],
    encode: impl Fn(&[f32; V], &mut [u8; B]),
) {
    for (values, block) in values.as_chunks().0.iter().zip(bytes.as_chunks_mut().0) {
        encode(values, block);
    }
}

/// Decodes f16 by the slice, for which `half` uses the processor's instructions.
fn halves(bytes: &[u8], values: &mut [f32]) {
    let mut aligned = [f16::ZERO; 512];
    for (bytes, values) in bytes.chunks(2 * aligned.len()).zip(values.chunks_mut(aligned.len())) {
        let aligned = &mut aligned[..values.len()];
        for (x, bytes) in aligned.iter_mut().zip(bytes.as_chunks().0) {
            *x = f16::from_le_bytes(*bytes);
        }
        aligned.convert_to_f32_slice(values);
    }
}

/// The f16 at a place of a block, as fp32.
fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Writes a value as the f16 at a place of a block.
fn put_half(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers by hand: max |x| = 254, so d = 2; ties go away from zero.
    #[test]
    fn q8_0_rounds_ties_away_from_zero() {
        let mut block = [0f32; 32];
        block[..6].copy_from_slice(&[254.0, -254.0, 1.0, -1.0, 3.0, 2.9]);
        let mut bytes = Vec::new();
        TensorType::Q8_0.encode(&block, &mut bytes);
        assert_eq!(bytes.len(), 34);
        assert_eq!(bytes[..2], f16::from_f32(2.0).to_le_bytes());
        let quantized: Vec<i8> = bytes[2..8].iter().map(|q| q.cast_signed()).collect();
        assert_eq!(quantized, [127, -127, 1, -1, 2, 1]);
        let mut values = Vec::new();
        TensorType::Q8_0.decode(&bytes, &mut values);
        assert_eq!(values[..6], [254.0, -254.0, 2.0, -2.0, 4.0, 2.0]);
    }

    #[test]
    fn a_block_of_zeros_stays_zero() {
        let mut bytes = Vec::new();
        TensorType::Q8_0.encode(&[0.0; 64], &mut bytes);
        assert_eq!(bytes, [0; 68]);
    }
}
