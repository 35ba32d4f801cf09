//! Rounding of small numbers and long sums in each number format, exactly.
//!
//! Nothing here is measured: it is arithmetic, the same on every machine.

use half::{bf16, f16};

/// A number format with round-to-nearest-even.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// 8 bits of exponent, 23 of mantissa.
    Fp32,
    /// 5 and 10.
    Fp16,
    /// 8 and 7.
    Bf16,
}

impl Format {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Fp32, Self::Fp16, Self::Bf16];

    /// Its name in records.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
        }
    }

    /// The nearest number of this format.
    pub(crate) fn round(self, value: f64) -> f64 {
        match self {
            Self::Fp32 => f64::from(value as f32),
            Self::Fp16 => f16::from_f64(value).to_f64(),
            Self::Bf16 => bf16::from_f64(value).to_f64(),
        }
    }
}

/// Adds `value`, rounded to `operand`, `times` times to a sum that is rounded to `accumulator` after each addition.
pub(crate) fn repeated_sum(value: f64, times: u32, operand: Format, accumulator: Format) -> f64 {
    let term = operand.round(value);
    (0..times).fold(0.0, |sum, _| accumulator.round(sum + term))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_numbers_and_long_sums_are_rounded_by_the_format() {
        // Below half of fp16's least number, 2⁻²⁴; bf16 has fp32's range.
        assert_eq!(Format::Fp16.round(1e-8), 0.0);
        assert!((Format::Bf16.round(1e-8) / 1e-8 - 1.0).abs() < 0.004);

        let sum = |operand, accumulator| repeated_sum(0.01, 1000, operand, accumulator);
        assert_eq!(format!("{:.5}", sum(Format::Fp32, Format::Fp32)), "10.00013");
        assert_eq!(format!("{:.3}", sum(Format::Fp16, Format::Fp16)), "9.953");
        assert_eq!(format!("{:.4}", sum(Format::Fp16, Format::Fp32)), "10.0021");
        // Half a step of bf16 at 4 is more than 0.01: the sum stops there.
        assert_eq!(sum(Format::Bf16, Format::Bf16), 4.0);
    }
}
