//! Decoding of blocks of 32 values.
//!
//! Byte j of the quants holds value j in its low four bits, and value j + 16 in its high ones. The loops are over arrays of fixed
//! length, so that the compiler vectorizes them.

use super::{E2M1, IQ4, half, half_scale};

/// Writes `value(q)` for the nibbles of 16 bytes.
fn nibbles(quants: &[u8], values: &mut [f32; 32], value: impl Fn(u8) -> f32) {
    let (low, high) = values.split_at_mut(16);
    for ((q, low), high) in quants.iter().zip(low).zip(high) {
        *low = value(q & 15);
        *high = value(q >> 4);
    }
}

/// Writes `value(q)` for 5-bit integers: the fifth bit of value j is bit j of `high`.
fn five_bits(high: &[u8], quants: &[u8], values: &mut [f32; 32], value: impl Fn(u8) -> f32) {
    let mut bits = [0u8; 32];
    for (bits, high) in bits.as_chunks_mut::<8>().0.iter_mut().zip(high) {
        for (shift, bit) in bits.iter_mut().enumerate() {
            *bit = (high >> shift & 1) << 4;
        }
    }
    for (j, q) in quants.iter().enumerate() {
        values[j] = value(q & 15 | bits[j]);
        values[j + 16] = value(q >> 4 | bits[j + 16]);
    }
}

/// d, quants.
pub(super) fn q4_0(block: &[u8; 18], values: &mut [f32; 32]) {
    let d = half(block, 0);
    nibbles(&block[2..], values, |q| d * (f32::from(q) - 8.0));
}

/// d, m, quants.
pub(super) fn q4_1(block: &[u8; 20], values: &mut [f32; 32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    nibbles(&block[4..], values, |q| d * f32::from(q) + m);
}

/// d, fifth bits, quants.
pub(super) fn q5_0(block: &[u8; 22], values: &mut [f32; 32]) {
    let d = half(block, 0);
    five_bits(&block[2..6], &block[6..], values, |q| d * (f32::from(q) - 16.0));
}

/// d, m, fifth bits, quants.
pub(super) fn q5_1(block: &[u8; 24], values: &mut [f32; 32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    five_bits(&block[4..8], &block[8..], values, |q| d * f32::from(q) + m);
}

/// d, signed bytes.
pub(super) fn q8_0(block: &[u8; 34], values: &mut [f32; 32]) {
    let d = half(block, 0);
    for (y, q) in values.iter_mut().zip(&block[2..]) {
        *y = f32::from(q.cast_signed()) * d;
    }
}

/// d, quants.
pub(super) fn iq4_nl(block: &[u8; 18], values: &mut [f32; 32]) {
    let d = half(block, 0);
    let products = IQ4.map(|value| d * f32::from(value));
    nibbles(&block[2..], values, |q| products[usize::from(q)]);
}

/// The exponent e of the scale 2^(e − 127), quants.
pub(super) fn mxfp4(block: &[u8; 17], values: &mut [f32; 32]) {
    let products = E2M1.map(|value| half_scale(block[0]) * f32::from(value));
    nibbles(&block[1..], values, |q| products[usize::from(q)]);
}
