//! Number formats: the bytes of a tensor, and the values of its elements.
//!
//! ```
//! use accounting::Dtype;
//!
//! // One matrix of GPT-3's feed-forward layer.
//! assert_eq!(Dtype::Fp32.tensor_bytes(&[12288 * 4, 12288])?, 2304 * 1024 * 1024);
//! assert_eq!(Dtype::Fp16.store(1e-8), 0.0);
//! assert!(Dtype::Bf16.store(1e-8) > 0.0);
//! # Ok::<(), accounting::Error>(())
//! ```
//!
//! The 2304 MiB of this matrix are 2.25 GiB or 2.42 GB; the lecture's "2.3 GB" is neither.
//!
//! Sources: CS336 (Stanford, 2025), lecture 2; [`float_format`](crate::float_format) for the bits.

use std::fmt;
use std::str::FromStr;

use crate::float_format::FloatFormat;
use crate::{Error, exact};

/// A number format of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE 754 double precision.
    Fp64,
    /// IEEE 754 single precision.
    Fp32,
    /// fp32's range with 10 bits of mantissa: a format of the multiplier, stored in 32 bits.
    Tf32,
    /// IEEE 754 half precision.
    Fp16,
    /// fp32's range with 7 bits of mantissa.
    Bf16,
    /// fp8 e4m3fn: weights and activations.
    Fp8E4m3,
    /// fp8 e5m2: gradients.
    Fp8E5m2,
    /// Two's complement, 8 bits, without a scale.
    Int8,
    /// Two's complement, 4 bits, two elements in a byte, without a scale.
    Int4,
}

impl Dtype {
    /// All formats, widest first.
    pub const ALL: [Self; 9] = [
        Self::Fp64,
        Self::Fp32,
        Self::Tf32,
        Self::Fp16,
        Self::Bf16,
        Self::Fp8E4m3,
        Self::Fp8E5m2,
        Self::Int8,
        Self::Int4,
    ];

    /// Returns the name for [`FromStr`].
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fp64 => "fp64",
            Self::Fp32 => "fp32",
            Self::Tf32 => "tf32",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
            Self::Fp8E4m3 => "fp8-e4m3",
            Self::Fp8E5m2 => "fp8-e5m2",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// Returns the bits of an element in memory.
    pub const fn storage_bits(self) -> u64 {
        match self {
            Self::Fp64 => 64,
            Self::Fp32 | Self::Tf32 => 32,
            Self::Fp16 | Self::Bf16 => 16,
            Self::Fp8E4m3 | Self::Fp8E5m2 | Self::Int8 => 8,
            Self::Int4 => 4,
        }
    }

    /// Returns the floating-point format; `None` for an integer.
    pub const fn float_format(self) -> Option<FloatFormat> {
        match self {
            Self::Fp64 => Some(FloatFormat::FP64),
            Self::Fp32 => Some(FloatFormat::FP32),
            Self::Tf32 => Some(FloatFormat::TF32),
            Self::Fp16 => Some(FloatFormat::FP16),
            Self::Bf16 => Some(FloatFormat::BF16),
            Self::Fp8E4m3 => Some(FloatFormat::E4M3),
            Self::Fp8E5m2 => Some(FloatFormat::E5M2),
            Self::Int8 | Self::Int4 => None,
        }
    }

    /// Returns the bytes of `elements` elements, packed: an odd number of int4 elements takes the last byte whole.
    pub fn bytes(self, elements: u64) -> Result<u64, Error> {
        if self == Self::Int4 {
            return Ok(elements.div_ceil(2));
        }
        exact::product("bytes of a tensor", &[elements, self.storage_bits() / 8])
    }

    /// Returns the bytes of a tensor of `shape`; a scalar has the empty shape. A size of 0 gives 0 bytes.
    pub fn tensor_bytes(self, shape: &[u64]) -> Result<u64, Error> {
        self.bytes(exact::product("elements of a tensor", shape)?)
    }

    /// Rounds `value` to the format, to nearest even. A float that overflows becomes infinity (NaN in e4m3fn), an
    /// integer saturates, and NaN becomes 0 in an integer.
    pub fn store(self, value: f64) -> f64 {
        match self {
            // Uses `half`, with which `float_format` agrees on every code.
            Self::Fp16 => half::f16::from_f64(value).to_f64(),
            Self::Bf16 => half::bf16::from_f64(value).to_f64(),
            _ => match self.float_format() {
                Some(format) => format.round(value),
                None => {
                    let limit = 2f64.powi(self.storage_bits() as i32 - 1);
                    let rounded = value.round_ties_even().clamp(-limit, limit - 1.0);
                    if rounded.is_nan() { 0.0 } else { rounded }
                }
            },
        }
    }

    /// Returns the range and precision of an element.
    pub fn limits(self) -> Limits {
        let float = self.float_format();
        let largest_integer = 2f64.powi(self.storage_bits() as i32 - 1) - 1.0;
        Limits {
            dtype: self,
            max: float.map_or(largest_integer, FloatFormat::max),
            min_normal: float.map(FloatFormat::min_normal),
            min_subnormal: float.map_or(1.0, FloatFormat::min_subnormal),
            epsilon: float.map(FloatFormat::epsilon),
            decimal_digits: float.map_or(largest_integer.log10() as u32, FloatFormat::decimal_digits),
            tiny: self.store(1e-8),
            tenth: self.store(0.1),
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Dtype {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wanted = text.to_ascii_lowercase();
        let wanted = match wanted.as_str() {
            "float64" | "double" => "fp64",
            "float32" | "float" => "fp32",
            "float16" | "half" => "fp16",
            "bfloat16" => "bf16",
            "float8_e4m3fn" | "e4m3" => "fp8-e4m3",
            "float8_e5m2" | "e5m2" => "fp8-e5m2",
            other => other,
        };
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == wanted)
            .ok_or_else(|| Error::unknown("dtype", text, Self::ALL.map(Self::name)))
    }
}

/// The range and precision of a [`Dtype`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// The format.
    pub dtype: Dtype,
    /// The largest finite number.
    pub max: f64,
    /// The smallest positive number of full precision; `None` for integers.
    pub min_normal: Option<f64>,
    /// The smallest positive number.
    pub min_subnormal: f64,
    /// The distance from 1 to the next number; `None` for integers.
    pub epsilon: Option<f64>,
    /// Decimal digits that survive a round trip.
    pub decimal_digits: u32,
    /// 1e-8 after rounding; 0 if it underflows.
    pub tiny: f64,
    /// 0.1 after rounding.
    pub tenth: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_bytes_are_exact() {
        assert_eq!(Dtype::Fp32.tensor_bytes(&[4, 8]).unwrap(), 128);
        assert_eq!(Dtype::Fp16.tensor_bytes(&[4, 8]).unwrap(), 64);
        assert_eq!(Dtype::Fp64.tensor_bytes(&[]).unwrap(), 8);
        assert_eq!(Dtype::Int4.tensor_bytes(&[3, 3]).unwrap(), 5);
        assert_eq!(Dtype::Fp32.tensor_bytes(&[3, 0]).unwrap(), 0);
        assert_eq!(Dtype::Fp32.tensor_bytes(&[12288 * 4, 12288]).unwrap(), 2304 << 20);
        assert!(Dtype::Fp32.tensor_bytes(&[u64::MAX, 4]).is_err());
        assert!(Dtype::Fp64.bytes(u64::MAX).is_err());
    }

    #[test]
    fn format_limits_match_published_values() {
        let max = |dtype: Dtype| dtype.limits().max;
        assert_eq!((max(Dtype::Fp8E4m3), max(Dtype::Fp8E5m2)), (448.0, 57344.0));
        assert_eq!((max(Dtype::Fp16), max(Dtype::Int8), max(Dtype::Int4)), (65504.0, 127.0, 7.0));
        assert_eq!(Dtype::Fp16.limits().min_subnormal, 2f64.powi(-24));
        assert_eq!(Dtype::Fp8E4m3.limits().min_subnormal, 2f64.powi(-9));
        assert_eq!(Dtype::Fp8E5m2.limits().min_subnormal, 2f64.powi(-16));
        assert_eq!(Dtype::Bf16.limits().epsilon, Some(0.0078125));
        // ⌊23 log10 2⌋ = 6 and so on, as in C's FLT_DIG and DBL_DIG.
        assert_eq!(Dtype::ALL.map(|d| d.limits().decimal_digits), [15, 6, 3, 3, 2, 0, 0, 2, 0]);
    }

    #[test]
    fn small_and_inexact_numbers_round_as_published() {
        let underflows: Vec<_> =
            Dtype::ALL.into_iter().filter(|d| d.limits().tiny == 0.0).map(Dtype::name).collect();
        assert_eq!(underflows, ["fp16", "fp8-e4m3", "fp8-e5m2", "int8", "int4"]);
        assert_eq!(Dtype::Fp32.limits().tenth, f64::from(0.1f32));
        assert_eq!(Dtype::Bf16.limits().tenth, 0.10009765625);
        assert_eq!(Dtype::Fp16.limits().tenth, 0.0999755859375);
        assert_eq!(Dtype::Fp8E4m3.limits().tenth, 0.1015625);
        assert_eq!(Dtype::Fp8E5m2.limits().tenth, 0.09375);
        assert_eq!(
            (Dtype::Int8.store(-1e9), Dtype::Int8.store(2.5), Dtype::Int4.store(f64::NAN)),
            (-128.0, 2.0, 0.0)
        );
    }

    #[test]
    fn names_round_trip() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.name().parse::<Dtype>().unwrap(), dtype);
        }
        assert_eq!("BFloat16".parse::<Dtype>().unwrap(), Dtype::Bf16);
    }
}
