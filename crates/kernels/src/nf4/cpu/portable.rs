//! The kernels without named vector instructions. The compiler vectorizes quantization for those it is dispatched to.

use std::sync::OnceLock;

use super::matvec::Row;
use super::{BLOCK, BYTES};
use crate::matvec::streams::VECTORS;
use crate::nf4::{TABLE, nested_map};

/// Dequantizes a block.
#[inline(always)]
pub(super) fn block(codes: &[u8; BYTES], scale: f32, out: &mut [f32; BLOCK]) {
    for (byte, pair) in codes.iter().zip(out.chunks_exact_mut(2)) {
        pair[0] = TABLE[usize::from(byte >> 4)] * scale;
        pair[1] = TABLE[usize::from(byte & 15)] * scale;
    }
}

/// Products of a row of whole blocks with N vectors.
pub(super) fn dots<const N: usize>(row: &Row<'_>, x: [&[f32]; N], out: &mut [f32; VECTORS]) {
    const LANES: usize = 8;
    let mut sums = [[0f32; LANES]; N];
    let mut values = [0.0; BLOCK];
    for (number, (codes, scale)) in row.codes.as_chunks::<BYTES>().0.iter().zip(row.scales).enumerate() {
        block(codes, *scale, &mut values);
        for (sums, x) in sums.iter_mut().zip(x) {
            let x = &x[number * BLOCK..(number + 1) * BLOCK];
            for (x, values) in x.chunks_exact(LANES).zip(values.chunks_exact(LANES)) {
                for lane in 0..LANES {
                    sums[lane] += x[lane] * values[lane];
                }
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        *out = sums.iter().sum();
    }
}

/// Quantizes blocks (the last may be shorter); returns whether all values are finite.
#[inline(always)]
pub(super) fn quantize(values: &[f32], scales: &mut [f32], codes: &mut [u8]) -> bool {
    /// The smallest divisor, so that a block of zeros has codes of zero.
    const LEAST: f32 = 1e-38;
    let mut finite = true;
    for ((values, scale), codes) in values.chunks(BLOCK).zip(scales).zip(codes.chunks_mut(BYTES)) {
        let mut padded = [0f32; BLOCK];
        padded[..values.len()].copy_from_slice(values);
        let mut most = 0f32;
        let mut all = true;
        for value in padded {
            most = most.max(value.abs());
            all &= value.abs() <= f32::MAX;
        }
        finite &= all;
        if values.len() == BLOCK {
            *scale = most;
            let inverse = 1.0 / most.max(LEAST);
            padded.iter_mut().for_each(|value| *value = (*value * inverse).clamp(-1.0, 1.0));
        } else {
            // bitsandbytes divides the values of a partial block, and stores the limited divisor.
            *scale = most.max(LEAST);
            padded.iter_mut().for_each(|value| *value = (*value / *scale).clamp(-1.0, 1.0));
        }
        let mut nearest = [0u8; BLOCK];
        for pair in TABLE.windows(2) {
            let bound = (pair[0] + pair[1]) / 2.0;
            for (code, value) in nearest.iter_mut().zip(padded) {
                *code += u8::from(value > bound);
            }
        }
        for (byte, pair) in codes.iter_mut().zip(nearest.chunks_exact(2)) {
            *byte = pair[0] << 4 | pair[1];
        }
    }
    finite
}

/// Steps of the interval [-1, 1] for which [`quantize_group`] knows the nearest value of the map.
const STEPS: usize = 65536;

/// Quantizes the scales of up to 256 blocks to eight bits; returns their factor. As bitsandbytes on a CPU: the quotient is first rounded to
/// one of 65536 steps.
pub(super) fn quantize_group(values: &[f32], codes: &mut [u8]) -> f32 {
    static NEAREST: OnceLock<Vec<u8>> = OnceLock::new();
    let nearest = NEAREST.get_or_init(|| {
        let map = nested_map();
        let mut code = 0;
        let step_sum = |step: usize| {
            let value = -1.0 + (2.0 * step as f32) / (STEPS - 1) as f32;
            while code < map.len() - 1 && 0.5 * (map[code] + map[code + 1]) < value {
                code += 1;
            }
            code as u8
        };
        (0..STEPS).map(step_sum).collect()
    });
    let most = values.iter().fold(0f32, |most, value| most.max(value.abs()));
    if most == 0.0 {
        codes.fill(0);
        return most;
    }
    let inverse = 1.0 / most;
    for (code, value) in codes.iter_mut().zip(values) {
        let value = (value * inverse).clamp(-1.0, 1.0);
        // Rounded as the compiler of bitsandbytes contracts it.
        let step = ((value + 1.0) * 0.5).mul_add((STEPS - 1) as f32, 0.5);
        *code = nearest[step as usize];
    }
    most
}
