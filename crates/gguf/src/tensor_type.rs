//! The storage types of a tensor's values, and the conversions from and to fp32.
//!
//! Values are rounded as llama.cpp rounds them: to the nearest, ties to even, for `f16` and `bf16`; for `q8_0` each 32 values x share
//! d = max |x| / 127, stored as `f16`, and are stored as the 8-bit integers round(x / d), ties away from zero, with d in fp32 (ggml's
//! `quantize_row_q8_0_ref`).

use std::fmt;

use half::{bf16, f16};

use crate::block;

/// Values that share a scale in `q8_0`.
pub const Q8_0_BLOCK: usize = 32;

/// The type of a tensor in a GGUF file: how its values are stored. [`crate::block`] has the layouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorType {
    /// 32-bit floats.
    F32,
    /// 16-bit floats of IEEE 754.
    F16,
    /// 16-bit brain floats.
    BF16,
    /// 4-bit integers and a scale.
    Q4_0,
    /// 4-bit integers, a scale and a minimum.
    Q4_1,
    /// 5-bit integers and a scale.
    Q5_0,
    /// 5-bit integers, a scale and a minimum.
    Q5_1,
    /// 8-bit integers and a scale.
    Q8_0,
    /// 2-bit integers with scales and minima in two levels.
    Q2K,
    /// 3-bit integers with scales in two levels.
    Q3K,
    /// 4-bit integers with scales and minima in two levels.
    Q4K,
    /// 5-bit integers with scales and minima in two levels.
    Q5K,
    /// 6-bit integers with scales in two levels.
    Q6K,
    /// Indices of a table of 16 values, and a scale.
    IQ4NL,
    /// Indices of a table of 16 values, with scales in two levels.
    IQ4XS,
    /// 4-bit floats and a power of two.
    MXFP4,
}

impl TensorType {
    /// All types.
    pub const ALL: [Self; 16] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::IQ4NL,
        Self::IQ4XS,
        Self::MXFP4,
    ];

    /// The types in which a conversion can store matrices.
    pub const WRITTEN: [Self; 4] = [Self::F32, Self::F16, Self::BF16, Self::Q8_0];

    /// The number in ggml, the name, and the values and bytes of a block.
    const fn facts(self) -> (u32, &'static str, usize, usize) {
        match self {
            Self::F32 => (0, "f32", 1, 4),
            Self::F16 => (1, "f16", 1, 2),
            Self::BF16 => (30, "bf16", 1, 2),
            Self::Q4_0 => (2, "q4_0", 32, 18),
            Self::Q4_1 => (3, "q4_1", 32, 20),
            Self::Q5_0 => (6, "q5_0", 32, 22),
            Self::Q5_1 => (7, "q5_1", 32, 24),
            Self::Q8_0 => (8, "q8_0", 32, 34),
            Self::Q2K => (10, "q2_K", 256, 84),
            Self::Q3K => (11, "q3_K", 256, 110),
            Self::Q4K => (12, "q4_K", 256, 144),
            Self::Q5K => (13, "q5_K", 256, 176),
            Self::Q6K => (14, "q6_K", 256, 210),
            Self::IQ4NL => (20, "iq4_nl", 32, 18),
            Self::IQ4XS => (23, "iq4_xs", 256, 136),
            Self::MXFP4 => (39, "mxfp4", 32, 17),
        }
    }

    /// Returns the number of the type in ggml.
    pub const fn number(self) -> u32 {
        self.facts().0
    }

    /// Returns the name of the type in ggml.
    pub const fn name(self) -> &'static str {
        self.facts().1
    }

    /// Returns the consecutive values of a row that are stored together; 1 for floats.
    pub const fn block_values(self) -> usize {
        self.facts().2
    }

    /// Returns the bytes of a block.
    pub const fn block_bytes(self) -> usize {
        self.facts().3
    }

    /// Returns the number of a file whose matrices have this type (`general.file_type`).
    pub fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 7,
            Self::BF16 => 32,
            _ => 1024,
        }
    }

    /// Returns the bytes of a row of `columns` values; `None` if a row is not a whole number of blocks, or for an overflow.
    pub fn row_bytes(self, columns: u64) -> Option<u64> {
        let values = self.block_values() as u64;
        let blocks = columns.is_multiple_of(values).then(|| columns / values)?;
        blocks.checked_mul(self.block_bytes() as u64)
    }

    /// Appends the encoded values to `bytes`. The values are whole blocks.
    ///
    /// # Panics
    /// For a type that is not among [`TensorType::WRITTEN`].
    pub fn encode(self, values: &[f32], bytes: &mut Vec<u8>) {
        match self {
            Self::F32 => bytes.extend(values.iter().flat_map(|x| x.to_le_bytes())),
            Self::F16 => bytes.extend(values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes())),
            Self::BF16 => bytes.extend(values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes())),
            Self::Q8_0 => values.chunks_exact(Q8_0_BLOCK).for_each(|block| encode_q8_0(block, bytes)),
            _ => panic!("{self} is not among the types that a conversion writes"),
        }
    }

    /// Decodes whole blocks, and appends the values.
    pub fn decode(self, bytes: &[u8], values: &mut Vec<f32>) {
        let start = values.len();
        values.resize(start + bytes.len() / self.block_bytes() * self.block_values(), 0.0);
        block::dequantize(self, bytes, &mut values[start..]);
    }

    /// Returns the largest rounding error of a value of this magnitude; for `q8_0`, of a value whose block has this maximum.
    pub(crate) fn rounding(self, magnitude: f32) -> f32 {
        match self {
            Self::F32 => 0.0,
            // Half a unit in the last place; below 2^-14, of the subnormal numbers.
            Self::F16 => (magnitude * 2f32.powi(-11)).max(2f32.powi(-25)),
            Self::BF16 => magnitude * 2f32.powi(-8) + f32::MIN_POSITIVE,
            // Half a step, and 127 times the rounding of the scale to f16.
            Self::Q8_0 => magnitude / 127.0 * 0.5001 + magnitude * 2f32.powi(-11) + 127.0 * 2f32.powi(-25),
            _ => f32::INFINITY,
        }
    }
}

fn encode_q8_0(block: &[f32], bytes: &mut Vec<u8>) {
    let largest = block.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let scale = largest / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    bytes.extend(f16::from_f32(scale).to_le_bytes());
    bytes.extend(block.iter().map(|x| ((x * inverse).round() as i8).cast_unsigned()));
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Types of ggml that this crate does not read, by their numbers.
const UNREADABLE: [(u32, &str); 13] = [
    (16, "iq2_xxs"),
    (17, "iq2_xs"),
    (18, "iq3_xxs"),
    (19, "iq1_s"),
    (21, "iq3_s"),
    (22, "iq2_s"),
    (29, "iq1_m"),
    (31, "q4_0_4_4"),
    (32, "q4_0_4_8"),
    (33, "q4_0_8_8"),
    (34, "tq1_0"),
    (35, "tq2_0"),
    (40, "nvfp4"),
];

/// Returns the error of a tensor whose type has this number.
pub(crate) fn unreadable_type(tensor: &str, number: u32) -> String {
    let known = TensorType::ALL.map(|kind| kind.to_string()).join(", ");
    match UNREADABLE.iter().find(|(other, _)| *other == number) {
        Some((_, name)) => format!(
            "`{tensor}` is {name}, which cannot be read; convert the file with llama.cpp: `llama-quantize --allow-requantize FILE OUT \
             q8_0` (readable are {known})"
        ),
        None => format!("`{tensor}` has the type {number} of ggml, which is unknown; readable are {known}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers by hand: max |x| = 254, so d = 2; ties go away from zero.
    #[test]
    fn q8_0_rounds_ties_away_from_zero() {
        let mut block = [0f32; Q8_0_BLOCK];
        block[..6].copy_from_slice(&[254.0, -254.0, 1.0, -1.0, 3.0, 2.9]);
        let mut bytes = Vec::new();
        TensorType::Q8_0.encode(&block, &mut bytes);
        assert_eq!(bytes.len(), TensorType::Q8_0.block_bytes());
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

    #[test]
    fn every_type_decodes_within_its_rounding() {
        let values: Vec<f32> =
            (0..320).map(|n| ((n * 7919 % 641) as f32 - 320.0) * 10f32.powi(n / 32 - 7)).collect();
        for kind in TensorType::WRITTEN {
            let (mut bytes, mut back) = (Vec::new(), Vec::new());
            kind.encode(&values, &mut bytes);
            assert_eq!(bytes.len() as u64, kind.row_bytes(320).unwrap());
            kind.decode(&bytes, &mut back);
            for (block, decoded) in values.chunks(Q8_0_BLOCK).zip(back.chunks(Q8_0_BLOCK)) {
                let largest = block.iter().fold(0f32, |largest, x| largest.max(x.abs()));
                for (x, y) in block.iter().zip(decoded) {
                    let magnitude = if kind == TensorType::Q8_0 { largest } else { x.abs() };
                    assert!((x - y).abs() <= kind.rounding(magnitude), "{kind}: {x} became {y}");
                }
            }
        }
    }
}
