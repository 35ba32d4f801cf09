//! Encoding of blocks of 32 values: the largest magnitude, or the smallest and the largest value, decide the scale.
//!
//! As ggml's `quantize_row_*_ref`: q is computed with 1/d in fp32, before d is rounded to f16.

use super::{E2M1, half_scale, put_half};

/// The value with the largest magnitude; the first of several.
fn extreme(x: &[f32; 32]) -> f32 {
    let mut largest = [0f32; 8];
    for x in x.as_chunks::<8>().0 {
        for (largest, x) in largest.iter_mut().zip(x) {
            *largest = if x.abs() > *largest { x.abs() } else { *largest };
        }
    }
    let largest = largest.iter().fold(0f32, |largest, x| largest.max(*x));
    *x.iter().find(|x| x.abs() == largest).unwrap_or(&0.0)
}

fn smallest_and_largest(x: &[f32; 32]) -> (f32, f32) {
    let (mut low, mut high) = ([f32::MAX; 8], [f32::MIN; 8]);
    for x in x.as_chunks::<8>().0 {
        for ((low, high), x) in low.iter_mut().zip(&mut high).zip(x) {
            *low = if x < low { *x } else { *low };
            *high = if x > high { *x } else { *high };
        }
    }
    (low.into_iter().fold(f32::MAX, f32::min), high.into_iter().fold(f32::MIN, f32::max))
}

/// 1/d; zero where that is infinite, since such a d is zero as f16.
fn inverse(d: f32) -> f32 {
    let inverse = 1.0 / d;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Rounds (x − low)/d, which is not negative, to an integer of at most `levels`.
fn levels(x: &[f32; 32], offset: impl Fn(f32) -> f32, levels: i32) -> [u8; 32] {
    x.map(|x| (offset(x) as i32).clamp(0, levels) as u8)
}

fn put_nibbles(q: &[u8; 32], bytes: &mut [u8]) {
    for (j, byte) in bytes.iter_mut().enumerate() {
        *byte = q[j] & 15 | (q[j + 16] & 15) << 4;
    }
}

fn put_fifth_bits(q: &[u8; 32], bytes: &mut [u8]) {
    for (byte, q) in bytes.iter_mut().zip(q.as_chunks::<8>().0) {
        *byte = q.iter().enumerate().fold(0, |bits, (bit, q)| bits | (q >> 4) << bit);
    }
}

pub(super) fn q4_0(x: &[f32; 32], block: &mut [u8; 18]) {
    let d = extreme(x) / -8.0;
    let inverse = inverse(d);
    put_half(block, 0, d);
    put_nibbles(&levels(x, |x| x * inverse + 8.5, 15), &mut block[2..]);
}

pub(super) fn q4_1(x: &[f32; 32], block: &mut [u8; 20]) {
    let (low, high) = smallest_and_largest(x);
    let d = (high - low) / 15.0;
    let inverse = inverse(d);
    put_half(block, 0, d);
    put_half(block, 2, low);
    put_nibbles(&levels(x, |x| (x - low) * inverse + 0.5, 15), &mut block[4..]);
}

pub(super) fn q5_0(x: &[f32; 32], block: &mut [u8; 22]) {
    let d = extreme(x) / -16.0;
    let inverse = inverse(d);
    let q = levels(x, |x| x * inverse + 16.5, 31);
    put_half(block, 0, d);
    put_fifth_bits(&q, &mut block[2..6]);
    put_nibbles(&q, &mut block[6..]);
}

pub(super) fn q5_1(x: &[f32; 32], block: &mut [u8; 24]) {
    let (low, high) = smallest_and_largest(x);
    let d = (high - low) / 31.0;
    let inverse = inverse(d);
    let q = levels(x, |x| (x - low) * inverse + 0.5, 31);
    put_half(block, 0, d);
    put_half(block, 2, low);
    put_fifth_bits(&q, &mut block[4..8]);
    put_nibbles(&q, &mut block[8..]);
}

pub(super) fn q8_0(x: &[f32; 32], block: &mut [u8; 34]) {
    let d = extreme(x).abs() / 127.0;
    let inverse = inverse(d);
    put_half(block, 0, d);
    for (q, x) in block[2..].iter_mut().zip(x) {
        // Ties go away from zero.
        *q = ((x * inverse).round() as i8).cast_unsigned();
    }
}

/// The exponent is that of the largest magnitude, less 2, since the largest of the values is 6; a value beyond is 6.
pub(super) fn mxfp4(x: &[f32; 32], block: &mut [u8; 17]) {
    let largest = extreme(x).abs();
    let exponent = if largest > 0.0 { (largest.log2().floor() - 2.0 + 127.0).max(0.0) as u8 } else { 0 };
    let products = E2M1.map(|value| half_scale(exponent) * f32::from(value));
    let nearest = |x: f32| {
        let mut best = (0, (products[0] - x).abs());
        for (code, product) in (1..).zip(&products[1..]) {
            let error = (product - x).abs();
            // The first of equal ones.
            best = if error < best.1 { (code, error) } else { best };
        }
        best.0
    };
    block[0] = exponent;
    put_nibbles(&x.map(nearest), &mut block[1..]);
}
