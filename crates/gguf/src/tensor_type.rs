//! The storage types of a tensor's values.

use std::fmt;

use crate::block;

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

    /// The types that [`block::quantize`] writes.
    pub const WRITTEN: [Self; 12] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::MXFP4,
    ];

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

    /// Whether values are integers or indices with scales, not floats of their own.
    pub const fn is_quantized(self) -> bool {
        self.block_values() > 1
    }

    /// Returns the bytes of a row of `columns` values; `None` if a row is not a whole number of blocks, or for an overflow.
    pub fn row_bytes(self, columns: u64) -> Option<u64> {
        let values = self.block_values() as u64;
        let blocks = columns.is_multiple_of(values).then(|| columns / values)?;
        blocks.checked_mul(self.block_bytes() as u64)
    }

    /// Encodes whole blocks, and appends the bytes.
    ///
    /// # Panics
    /// As [`block::quantize`].
    pub fn encode(self, values: &[f32], bytes: &mut Vec<u8>) {
        let start = bytes.len();
        bytes.resize(start + values.len() / self.block_values() * self.block_bytes(), 0);
        block::quantize(self, values, &mut bytes[start..]);
    }

    /// Decodes whole blocks, and appends the values.
    pub fn decode(self, bytes: &[u8], values: &mut Vec<f32>) {
        let start = values.len();
        values.resize(start + bytes.len() / self.block_bytes() * self.block_values(), 0.0);
        block::dequantize(self, bytes, &mut values[start..]);
    }
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
