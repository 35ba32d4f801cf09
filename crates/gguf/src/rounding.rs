//! How far a stored value may be from the value that was encoded.

use crate::tensor_type::TensorType;

/// The largest difference that rounding gives, as a multiple of the largest magnitude in a block, and an absolute part for f16 scales
/// among the subnormal numbers.
///
/// For the K-quants it bounds the root of the mean squared difference over a block: their search keeps the sum of weighted squares at most
/// that of dividing each group's range evenly, which has a step of at most 2/15 (q4_K), 2/31 (q5_K) or 1/32 (q6_K); weights differ, which
/// costs a factor of √2, and the rounding of scales to 6 bits adds half a step more.
fn largest(kind: TensorType) -> (f32, f32) {
    let half_ulp = 2f32.powi(-11);
    let smallest = 2f32.powi(-25);
    match kind {
        TensorType::F32 => (0.0, 0.0),
        TensorType::F16 => (half_ulp, smallest),
        TensorType::BF16 => (2f32.powi(-8), f32::MIN_POSITIVE),
        // A step where a magnitude as large as the largest has the other sign; half a step else.
        TensorType::Q4_0 => (1.0 / 8.0 + half_ulp, 8.0 * smallest),
        TensorType::Q5_0 => (1.0 / 16.0 + half_ulp, 16.0 * smallest),
        TensorType::Q4_1 => (1.0 / 15.0 * 1.001 + 3.0 * half_ulp, 16.0 * smallest),
        TensorType::Q5_1 => (1.0 / 31.0 * 1.001 + 3.0 * half_ulp, 32.0 * smallest),
        TensorType::Q8_0 => (0.5001 / 127.0 + half_ulp, 127.0 * smallest),
        TensorType::Q4K => (0.12, 1000.0 * smallest),
        TensorType::Q5K => (0.07, 2000.0 * smallest),
        TensorType::Q6K => (0.04, 4200.0 * smallest),
        // A largest magnitude of just below 8 is stored as 6.
        TensorType::MXFP4 => (0.2501, f32::MIN_POSITIVE),
        TensorType::Q2K | TensorType::Q3K | TensorType::IQ4NL | TensorType::IQ4XS => {
            unreachable!("{kind} is not written")
        }
    }
}

/// Returns the largest magnitude whose blocks have finite f16 scales.
pub(crate) fn largest_value(kind: TensorType) -> f32 {
    /// From here on an f16 is rounded to infinity.
    const F16: f32 = 65519.0;
    match kind {
        TensorType::F32 | TensorType::BF16 | TensorType::MXFP4 => f32::MAX,
        TensorType::F16 => F16,
        TensorType::Q8_0 => F16 * 127.0,
        TensorType::Q4_0 => F16 * 8.0,
        TensorType::Q5_0 => F16 * 16.0,
        // The smallest value is an f16.
        TensorType::Q4_1 | TensorType::Q5_1 => F16,
        // A scale is at least 63 times smaller than the range; the search may make it larger than that by a few steps.
        _ => F16 * 16.0,
    }
}

/// Returns the first pair (meant, written) that differs by more than rounding; for a K-quant the pair that differs most in the first
/// block that does. Both are whole rows.
pub(crate) fn first_difference(kind: TensorType, meant: &[f32], written: &[f32]) -> Option<(f32, f32)> {
    let (relative, absolute) = largest(kind);
    let block = kind.block_values();
    for (meant, written) in meant.chunks(block).zip(written.chunks(block)) {
        let limit = relative * meant.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let limit = if kind == TensorType::F16 { limit.max(absolute) } else { limit + absolute };
        let pairs = || meant.iter().zip(written);
        if block > 32 {
            let squares: f64 = pairs().map(|(x, y)| f64::from(x - y).powi(2)).sum();
            let root = (squares / block as f64).sqrt();
            if root.is_nan() || root > f64::from(limit) {
                let most = pairs().max_by(|(a, b), (x, y)| (*a - *b).abs().total_cmp(&(*x - *y).abs()));
                return most.map(|(x, y)| (*x, *y));
            }
        } else if let Some((x, y)) =
            pairs().find(|(x, y)| (*x - *y).abs().is_nan() || (*x - *y).abs() > limit)
        {
            return Some((*x, *y));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten magnitudes, ties, and one outlier in each block.
    #[test]
    fn every_type_decodes_within_its_rounding() {
        let mut values: Vec<f32> =
            (0..2560).map(|n| ((n * 7919 % 641) as f32 - 320.0) * 10f32.powi(n / 256 - 8)).collect();
        values.iter_mut().step_by(97).for_each(|x| *x *= 5.0);
        for kind in TensorType::WRITTEN {
            let (mut bytes, mut back) = (Vec::new(), Vec::new());
            kind.encode(&values, &mut bytes);
            assert_eq!(bytes.len() as u64, kind.row_bytes(2560).unwrap());
            kind.decode(&bytes, &mut back);
            assert_eq!(first_difference(kind, &values, &back), None, "{kind}");
            // Rows in another order are found.
            back.rotate_left(256);
            assert!(first_difference(kind, &values, &back).is_some(), "{kind}");
        }
    }
}
