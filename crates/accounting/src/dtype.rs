//! Number formats, and the bytes of a tensor.
//!
//! ```
//! use accounting::Dtype;
//!
//! // One matrix of GPT-3's feed-forward layer.
//! assert_eq!(Dtype::Fp32.tensor_bytes(&[12288 * 4, 12288])?, 2304 * 1024 * 1024);
//! # Ok::<(), accounting::Error>(())
//! ```
//!
//! The 2304 MiB of this matrix are 2.25 GiB or 2.42 GB; the lecture's "2.3 GB" is neither.

use std::fmt;
use std::str::FromStr;

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
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Dtype {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let lower = text.to_ascii_lowercase();
        let name = match lower.as_str() {
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
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| Error::unknown("dtype", text, Self::ALL.map(Self::name)))
    }
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
    fn names_round_trip() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.name().parse::<Dtype>().unwrap(), dtype);
        }
        assert_eq!("BFloat16".parse::<Dtype>().unwrap(), Dtype::Bf16);
    }
}
