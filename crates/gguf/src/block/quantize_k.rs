//! Encoding of blocks of 256 values, as ggml's `quantize_row_*_K_ref`, without an importance matrix.
//!
//! Each group of n values x gets the scale s and the minimum m that make Σ w·(s·q + m − x)² small: for several ways to divide the range
//! into levels, q is rounded, and the s and m of least squares for this q are computed. q4_K and q5_K weigh with w = √(mean x²) + |x|,
//! q6_K with w = x² and m = 0. The scales of a block are then rounded to multiples of one f16, and all q are computed again with them.
//!
//! ggml searches group after group, and its sums are sequential. Here the groups of a block are the lanes of vectors, `x[i][group]`:
//! every sum has ggml's order, so the bytes are the same, and the compiler vectorizes over groups.

use super::dequantize_k::scales_and_minima;
use super::{half, put_half};

/// Below this magnitude a group is zero.
const ZERO: f32 = 1e-15;

/// Rounds to the nearest integer, ties to even, for |x| < 2^22.
fn nearest(x: f32) -> i32 {
    // Above 1.5·2^23 the last bit of the mantissa is worth 1.
    ((x + 12_582_912.0).to_bits() & 0x7f_ffff) as i32 - 0x40_0000
}

/// Groups as lanes: value i of each of `G` groups.
type Lanes<const N: usize, const G: usize> = [[f32; G]; N];

fn lanes<const N: usize, const G: usize>(x: &[f32; 256]) -> Lanes<N, G> {
    std::array::from_fn(|i| std::array::from_fn(|group| x[N * group + i]))
}

/// The scale and the minimum of each group, and where its levels q = (x − low)·inverse begin.
struct Fit {
    scale: [f32; 8],
    /// −m, which is not negative.
    minimum: [f32; 8],
    low: [f32; 8],
    inverse: [f32; 8],
}

/// Tries levels 0 to `top` over the range `(from + step·n + top) / (high − low)` for n from 0 to `tries`.
fn fit(x: &Lanes<32, 8>, top: i32, from: f32, step: f32, tries: u32) -> Fit {
    const G: usize = 8;
    let level = |x: f32, low: f32, inverse: f32| nearest(inverse * (x - low)).clamp(0, top) as f32;

    // Weights, their sums, and the range, which includes zero.
    let mut squares = [0f32; G];
    for x in x {
        for g in 0..G {
            squares[g] += x[g] * x[g];
        }
    }
    let root = squares.map(|sum| (sum / 32.0).sqrt());
    let weights: Lanes<32, 8> = std::array::from_fn(|i| std::array::from_fn(|g| root[g] + x[i][g].abs()));
    let [mut low, mut high, mut sum_w, mut sum_wx] = [x[0], x[0], [0f32; G], [0f32; G]];
    for (x, w) in x.iter().zip(&weights) {
        for g in 0..G {
            low[g] = if x[g] < low[g] { x[g] } else { low[g] };
            high[g] = if x[g] > high[g] { x[g] } else { high[g] };
            sum_w[g] += w[g];
            sum_wx[g] += w[g] * x[g];
        }
    }
    let mut low = low.map(|low| if low > 0.0 { 0.0 } else { low });
    let first_low = low;

    // The plain division of the range.
    let mut best = Fit { scale: [0.0; G], minimum: [0.0; G], low, inverse: [0.0; G] };
    let mut least = [0f32; G];
    for g in 0..G {
        best.inverse[g] = top as f32 / (high[g] - low[g]);
        best.scale[g] = 1.0 / best.inverse[g];
    }
    for (x, w) in x.iter().zip(&weights) {
        for g in 0..G {
            let difference = best.scale[g] * level(x[g], low[g], best.inverse[g]) + low[g] - x[g];
            least[g] += w[g] * (difference * difference);
        }
    }

    for n in 0..=tries {
        let wanted = from + step * n as f32 + top as f32;
        // As in ggml, the range starts at the best minimum so far.
        let inverse: [f32; G] = std::array::from_fn(|g| wanted / (high[g] - low[g]));
        let [mut sum_q, mut sum_qq, mut sum_xq] = [[0f32; G]; 3];
        let mut q: Lanes<32, 8> = [[0.0; G]; 32];
        for ((x, w), q) in x.iter().zip(&weights).zip(&mut q) {
            for g in 0..G {
                q[g] = level(x[g], low[g], inverse[g]);
                let wq = w[g] * q[g];
                sum_q[g] += wq;
                sum_qq[g] += wq * q[g];
                sum_xq[g] += wq * x[g];
            }
        }
        // Least squares for these q; a minimum above zero cannot be stored.
        let [mut scale, mut minimum, mut determinant] = [[0f32; G]; 3];
        for g in 0..G {
            determinant[g] = sum_w[g] * sum_qq[g] - sum_q[g] * sum_q[g];
            scale[g] = (sum_w[g] * sum_xq[g] - sum_wx[g] * sum_q[g]) / determinant[g];
            minimum[g] = (sum_qq[g] * sum_wx[g] - sum_q[g] * sum_xq[g]) / determinant[g];
            let is_above = minimum[g] > 0.0;
            scale[g] = if is_above { sum_xq[g] / sum_qq[g] } else { scale[g] };
            minimum[g] = if is_above { 0.0 } else { minimum[g] };
        }
        let mut error = [0f32; G];
        for ((x, w), q) in x.iter().zip(&weights).zip(&q) {
            for g in 0..G {
                let difference = scale[g] * q[g] + minimum[g] - x[g];
                error[g] += w[g] * (difference * difference);
            }
        }
        for g in 0..G {
            if determinant[g] > 0.0 && error[g] < least[g] {
                least[g] = error[g];
                (best.scale[g], best.low[g], best.inverse[g]) = (scale[g], low[g], inverse[g]);
                low[g] = minimum[g];
            }
        }
    }
    for g in 0..G {
        best.minimum[g] = -low[g];
        if high[g] == first_low[g] {
            // All values are the same, and not above zero: q is zero.
            (best.scale[g], best.minimum[g], best.inverse[g]) = (0.0, -first_low[g], 0.0);
        }
    }
    best
}

/// Writes d, the factor of the minima, and the scales and minima of eight groups; returns the levels of all values.
fn quantize_groups(x: &[f32; 256], top: i32, fit: &Fit, block: &mut [u8]) -> [u8; 256] {
    let largest =
        |values: &[f32; 8]| values.iter().fold(0f32, |largest, x| if *x > largest { *x } else { largest });
    let (scale, minimum) = (largest(&fit.scale), largest(&fit.minimum));
    put_half(block, 0, scale / 63.0);
    put_half(block, 2, minimum / 63.0);
    let integers = |values: &[f32; 8], largest: f32| {
        let inverse = if largest > 0.0 { 63.0 / largest } else { 0.0 };
        values.map(|x| (nearest(inverse * x) as u8).min(63))
    };
    let (scales, minima) = (integers(&fit.scale, scale), integers(&fit.minimum, minimum));
    for j in 0..4 {
        block[4 + j] = scales[j] | scales[j + 4] >> 4 << 6;
        block[8 + j] = minima[j] | minima[j + 4] >> 4 << 6;
        block[12 + j] = scales[j + 4] & 15 | (minima[j + 4] & 15) << 4;
    }

    // The levels for the scales as they are stored.
    let [scales, minima] = scales_and_minima(&block[4..16]);
    let (d, minimum) = (half(block, 0), half(block, 2));
    let mut levels = [0; 256];
    let groups = x.as_chunks::<32>().0.iter().zip(levels.as_chunks_mut::<32>().0);
    for (g, (x, levels)) in groups.enumerate() {
        let (d, m) = (d * f32::from(scales[g]), minimum * f32::from(minima[g]));
        for (q, x) in levels.iter_mut().zip(x) {
            let level = if d == 0.0 { fit.inverse[g] * (x - fit.low[g]) } else { (x + m) / d };
            *q = nearest(level).clamp(0, top) as u8;
        }
    }
    levels
}

pub(super) fn q4_k(x: &[f32; 256], block: &mut [u8; 144]) {
    let fit = fit(&lanes(x), 15, -1.0, 0.1, 20);
    let levels = quantize_groups(x, 15, &fit, block);
    let pairs = levels.as_chunks::<64>().0.iter();
    for (levels, bytes) in pairs.zip(block[16..].as_chunks_mut::<32>().0) {
        for (l, byte) in bytes.iter_mut().enumerate() {
            *byte = levels[l] | levels[l + 32] << 4;
        }
    }
}

pub(super) fn q5_k(x: &[f32; 256], block: &mut [u8; 176]) {
    let fit = fit(&lanes(x), 31, -0.5, 0.1, 15);
    let levels = quantize_groups(x, 31, &fit, block);
    let (high, low) = block[16..].split_at_mut(32);
    high.fill(0);
    let pairs = levels.as_chunks::<64>().0.iter();
    for (pair, (levels, bytes)) in pairs.zip(low.as_chunks_mut::<32>().0).enumerate() {
        for (l, byte) in bytes.iter_mut().enumerate() {
            let (first, second) = (levels[l], levels[l + 32]);
            *byte = first & 15 | (second & 15) << 4;
            high[l] |= (first >> 4 | second >> 4 << 1) << (2 * pair);
        }
    }
}

/// The scale of each of 16 groups, and the inverse of the step that its levels were rounded with.
fn fit_symmetric(x: &Lanes<16, 16>) -> [[f32; 16]; 2] {
    const G: usize = 16;
    let [mut largest, mut extreme] = [[0f32; G]; 2];
    for x in x {
        for g in 0..G {
            let is_larger = x[g].abs() > largest[g];
            extreme[g] = if is_larger { x[g] } else { extreme[g] };
            largest[g] = if is_larger { x[g].abs() } else { largest[g] };
        }
    }
    let sums = |inverse: &[f32; G]| {
        let [mut sum_xq, mut sum_qq] = [[0f32; G]; 2];
        for x in x {
            for g in 0..G {
                let q = nearest(inverse[g] * x[g]).clamp(-32, 31) as f32;
                let w = x[g] * x[g];
                sum_xq[g] += w * x[g] * q;
                sum_qq[g] += w * q * q;
            }
        }
        [sum_xq, sum_qq]
    };
    let mut best_inverse = extreme.map(|x| -32.0 / x);
    let [sum_xq, sum_qq] = sums(&best_inverse);
    let [mut scale, mut most] = [[0f32; G]; 2];
    for g in 0..G {
        scale[g] = if sum_qq[g] == 0.0 { 0.0 } else { sum_xq[g] / sum_qq[g] };
        most[g] = scale[g] * sum_xq[g];
    }
    for n in (-9..=9).filter(|n| *n != 0) {
        let inverse = extreme.map(|x| -(32.0 + 0.1 * n as f32) / x);
        let [sum_xq, sum_qq] = sums(&inverse);
        for g in 0..G {
            if sum_qq[g] > 0.0 && sum_xq[g] * sum_xq[g] > most[g] * sum_qq[g] {
                scale[g] = sum_xq[g] / sum_qq[g];
                most[g] = scale[g] * sum_xq[g];
                best_inverse[g] = inverse[g];
            }
        }
    }
    for g in 0..G {
        if largest[g] < ZERO {
            scale[g] = 0.0;
        }
    }
    [scale, best_inverse]
}

pub(super) fn q6_k(x: &[f32; 256], block: &mut [u8; 210]) {
    block.fill(0);
    let [scales, inverses] = fit_symmetric(&lanes(x));
    let largest = scales.iter().fold(0f32, |largest, x| if x.abs() > largest.abs() { *x } else { largest });
    if largest.abs() < ZERO {
        return;
    }
    let inverse = -128.0 / largest;
    put_half(block, 208, 1.0 / inverse);
    let d = half(block, 208);
    let mut levels = [0u8; 256];
    let groups = x.as_chunks::<16>().0.iter().zip(levels.as_chunks_mut::<16>().0);
    for (g, (x, levels)) in groups.enumerate() {
        let integer = nearest(inverse * scales[g]).min(127) as i8;
        block[192 + g] = integer.cast_unsigned();
        let d = d * f32::from(integer);
        for (q, x) in levels.iter_mut().zip(x) {
            *q = match (d == 0.0, scales[g] == 0.0) {
                (false, _) => (nearest(x / d).clamp(-32, 31) + 32) as u8,
                (true, false) => (nearest(inverses[g] * x).clamp(-32, 31) + 32) as u8,
                // A group of zeros has the level 0 in ggml; its scale is zero.
                (true, true) => 0,
            };
        }
    }
    for (h, levels) in levels.as_chunks::<128>().0.iter().enumerate() {
        for l in 0..32 {
            let [a, b, c, d] = [levels[l], levels[l + 32], levels[l + 64], levels[l + 96]];
            block[64 * h + l] = a & 15 | (c & 15) << 4;
            block[64 * h + 32 + l] = b & 15 | (d & 15) << 4;
            block[128 + 32 * h + l] = a >> 4 | b >> 4 << 2 | c >> 4 << 4 | d >> 4 << 6;
        }
    }
}
