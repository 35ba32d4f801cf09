//! Limits of number formats: range, precision, and how numbers round to them.
//!
//! Sources: CS336 (Stanford, 2025), lecture 2; [`FloatFormat`] for the bits.

use accounting::Dtype;

use super::float_format::FloatFormat;

/// The range and precision of a [`Dtype`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Limits {
    /// The largest finite number.
    pub(crate) max: f64,
    /// The smallest positive number of full precision; `None` for integers.
    pub(crate) min_normal: Option<f64>,
    /// The smallest positive number.
    pub(crate) min_subnormal: f64,
    /// The distance from 1 to the next number; `None` for integers.
    pub(crate) epsilon: Option<f64>,
    /// Decimal digits that survive a round trip.
    pub(crate) decimal_digits: u32,
    /// 1e-8 after rounding; 0 if it underflows.
    pub(crate) tiny: f64,
    /// 0.1 after rounding.
    pub(crate) tenth: f64,
}

impl Limits {
    pub(crate) fn new(dtype: Dtype) -> Self {
        let float = float_format(dtype);
        let largest_integer = 2f64.powi(dtype.storage_bits() as i32 - 1) - 1.0;
        Self {
            max: float.map_or(largest_integer, FloatFormat::max),
            min_normal: float.map(FloatFormat::min_normal),
            min_subnormal: float.map_or(1.0, FloatFormat::min_subnormal),
            epsilon: float.map(FloatFormat::epsilon),
            decimal_digits: float.map_or(largest_integer.log10() as u32, FloatFormat::decimal_digits),
            tiny: store(dtype, 1e-8),
            tenth: store(dtype, 0.1),
        }
    }
}

/// The floating-point format; `None` for an integer.
const fn float_format(dtype: Dtype) -> Option<FloatFormat> {
    match dtype {
        Dtype::Fp64 => Some(FloatFormat::FP64),
        Dtype::Fp32 => Some(FloatFormat::FP32),
        Dtype::Tf32 => Some(FloatFormat::TF32),
        Dtype::Fp16 => Some(FloatFormat::FP16),
        Dtype::Bf16 => Some(FloatFormat::BF16),
        Dtype::Fp8E4m3 => Some(FloatFormat::E4M3),
        Dtype::Fp8E5m2 => Some(FloatFormat::E5M2),
        Dtype::Int8 | Dtype::Int4 => None,
    }
}

/// Rounds `value` to the format, to nearest even. A float that overflows becomes infinity (NaN in e4m3fn), an integer saturates, and NaN
/// becomes 0 in an integer.
fn store(dtype: Dtype, value: f64) -> f64 {
    match float_format(dtype) {
        Some(format) => format.round(value),
        None => {
            let limit = 2f64.powi(dtype.storage_bits() as i32 - 1);
            let rounded = value.round_ties_even().clamp(-limit, limit - 1.0);
            if rounded.is_nan() { 0.0 } else { rounded }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_limits_match_published_values() {
        let max = |dtype: Dtype| Limits::new(dtype).max;
        assert_eq!((max(Dtype::Fp8E4m3), max(Dtype::Fp8E5m2)), (448.0, 57344.0));
        assert_eq!((max(Dtype::Fp16), max(Dtype::Int8), max(Dtype::Int4)), (65504.0, 127.0, 7.0));
        assert_eq!(Limits::new(Dtype::Fp16).min_subnormal, 2f64.powi(-24));
        assert_eq!(Limits::new(Dtype::Fp8E4m3).min_subnormal, 2f64.powi(-9));
        assert_eq!(Limits::new(Dtype::Fp8E5m2).min_subnormal, 2f64.powi(-16));
        assert_eq!(Limits::new(Dtype::Bf16).epsilon, Some(0.0078125));
        // ⌊23 log10 2⌋ = 6 and so on, as in C's FLT_DIG and DBL_DIG.
        assert_eq!(Dtype::ALL.map(|d| Limits::new(d).decimal_digits), [15, 6, 3, 3, 2, 0, 0, 2, 0]);
    }

    #[test]
    fn small_and_inexact_numbers_round_as_published() {
        let underflows: Vec<_> =
            Dtype::ALL.into_iter().filter(|d| Limits::new(*d).tiny == 0.0).map(Dtype::name).collect();
        assert_eq!(underflows, ["fp16", "fp8-e4m3", "fp8-e5m2", "int8", "int4"]);
        assert_eq!(Limits::new(Dtype::Fp32).tenth, f64::from(0.1f32));
        assert_eq!(Limits::new(Dtype::Bf16).tenth, 0.10009765625);
        assert_eq!(Limits::new(Dtype::Fp16).tenth, 0.0999755859375);
        assert_eq!(Limits::new(Dtype::Fp8E4m3).tenth, 0.1015625);
        assert_eq!(Limits::new(Dtype::Fp8E5m2).tenth, 0.09375);
        assert_eq!(
            (store(Dtype::Int8, -1e9), store(Dtype::Int8, 2.5), store(Dtype::Int4, f64::NAN)),
            (-128.0, 2.0, 0.0)
        );
    }

    #[test]
    fn rounding_to_a_dtype_is_idempotent() {
        for value in [0.0, -0.0, 1e-300, 0.3, -2.5, 1e5, 3.4e38, -1e300, f64::INFINITY, f64::NAN] {
            for dtype in Dtype::ALL {
                let once = store(dtype, value);
                let twice = store(dtype, once);
                assert!(once.to_bits() == twice.to_bits() || (once.is_nan() && twice.is_nan()));
            }
        }
    }
}
