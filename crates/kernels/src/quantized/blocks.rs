//! Matrices in the blocks of GGUF files, as llama.cpp stores them.
//!
//! A row is cut into blocks of 32 or 256 weights, each with its scales and codes. Every type has the form
//!
//! ```text
//! ŵ = s·(c − z) − m        c an unsigned code of at most 8 bits, z the type's zero; s and m of 16 or 32 weights
//! ```
//!
//! where s and m are products of at most 18 significant bits of the block's fp16 factors and small integers, so that s·(c − z) is exact in
//! fp32, and the difference is the only rounding: whatever the order and the instructions, a value has the bits of llama.cpp's.
//!
//! | type | weights and bytes of a block | s | m |
//! |---|---|---|---|
//! | `Q4_0`, `Q5_0`, `Q8_0`, `IQ4_NL` | 32: 18, 22, 34, 18 | d | – |
//! | `Q4_1`, `Q5_1` | 32: 20, 24 | d | stored, with the other sign |
//! | `Q2_K`, `Q4_K`, `Q5_K` | 256: 84, 144, 176 | d·(4 or 6 bits) | d'·(4 or 6 bits) |
//! | `Q3_K`, `Q6_K` | 256: 110, 210 | d·(6 or 8 bits) | – |
//!
//! **One tensor** `[out, blocks of a row, bytes of a block]` in u8; the bytes of a block say the type, and `IQ4_NL`, whose blocks are as
//! long as those of `Q4_0`, is in i8. The bytes are those of the file, so a matrix is copied and never converted; rows can be selected or
//! permuted like those of any tensor.
//!
//! **A few vectors** ([`matvec`](super::matvec)) are multiplied with codes. With AVX2 or AVX-512 VNNI each vector in bf16 is rounded to 15 bits
//! for each 16 of its numbers (an error of at most 2⁻¹⁴ of their largest), and products with codes are exact sums of integers, scaled and
//! summed in fp32. Elsewhere, and for vectors in fp32, products and sums are in fp32. Both read each weight once.
//!
//! There is no kernel for a GPU: a weight on one is an error.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod chunk;
mod cpu;
mod dots;
#[cfg(target_arch = "x86_64")]
mod integers;
#[cfg(target_arch = "x86_64")]
mod words;

use std::ops::Range;

use runtime::Result;
use tch::{Device, Kind, Tensor};

pub(super) use dots::matvec;

use super::refuse;

/// The dtype of a model whose matrices stay in the blocks of their file. No tensor has it: a file's matrices differ in their types.
pub const KIND: Kind = Kind::QUInt8;

/// A type of blocks, by its name in ggml.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlockType {
    /// 4 bits around 8, a scale for each 32 weights.
    Q4_0,
    /// 4 bits, a scale and a minimum for each 32.
    Q4_1,
    /// 5 bits around 16, a scale for each 32.
    Q5_0,
    /// 5 bits, a scale and a minimum for each 32.
    Q5_1,
    /// 8 bits, a scale for each 32.
    Q8_0,
    /// 2 bits, a scale and a minimum of 4 bits for each 16.
    Q2K,
    /// 3 bits around 4, a scale of 6 bits for each 16.
    Q3K,
    /// 4 bits, a scale and a minimum of 6 bits for each 32.
    Q4K,
    /// 5 bits, a scale and a minimum of 6 bits for each 32.
    Q5K,
    /// 6 bits around 32, a scale of 8 bits for each 16.
    Q6K,
    /// 16 values that are not evenly spaced, a scale for each 32.
    Iq4Nl,
}

impl BlockType {
    /// All types.
    pub const ALL: [Self; 11] = [
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
        Self::Iq4Nl,
    ];

    /// Returns the name and the number in ggml, and the weights and bytes of a block.
    const fn facts(self) -> (&'static str, u32, usize, usize) {
        match self {
            Self::Q4_0 => ("q4_0", 2, 32, 18),
            Self::Q4_1 => ("q4_1", 3, 32, 20),
            Self::Q5_0 => ("q5_0", 6, 32, 22),
            Self::Q5_1 => ("q5_1", 7, 32, 24),
            Self::Q8_0 => ("q8_0", 8, 32, 34),
            Self::Q2K => ("q2_K", 10, 256, 84),
            Self::Q3K => ("q3_K", 11, 256, 110),
            Self::Q4K => ("q4_K", 12, 256, 144),
            Self::Q5K => ("q5_K", 13, 256, 176),
            Self::Q6K => ("q6_K", 14, 256, 210),
            Self::Iq4Nl => ("iq4_nl", 20, 32, 18),
        }
    }

    /// Returns the name in ggml.
    pub const fn name(self) -> &'static str {
        self.facts().0
    }

    /// Returns the type with this number in ggml.
    pub fn from_ggml(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.facts().1 == number)
    }

    /// Returns the weights of a block.
    pub const fn values(self) -> usize {
        self.facts().2
    }

    /// Returns the bytes of a block.
    pub const fn bytes(self) -> usize {
        self.facts().3
    }

    /// Returns the dtype of tensors of these blocks.
    pub const fn kind(self) -> Kind {
        if matches!(self, Self::Iq4Nl) { Kind::Int8 } else { Kind::Uint8 }
    }

    /// Returns the type of a tensor's blocks; `None` for a tensor of another form.
    pub fn of(weight: &Tensor) -> Option<Self> {
        let &[_, _, bytes] = &weight.size()[..] else { return None };
        let kind = weight.kind();
        Self::ALL.into_iter().find(|one| one.bytes() as i64 == bytes && one.kind() == kind)
    }

    /// Returns the shape of the tensor for a matrix `[out, in]`.
    ///
    /// # Errors
    /// Sizes below 1; rows that are not whole blocks.
    pub fn tensor_shape(self, [out, inner]: [i64; 2]) -> Result<[i64; 3]> {
        let values = self.values() as i64;
        if out < 1 || inner < 1 || inner % values != 0 || out.checked_mul(inner).is_none() {
            let name = self.name();
            return Err(refuse(format!(
                "a matrix [{out}, {inner}] in {name}; expected rows of whole blocks of {values}"
            )));
        }
        Ok([out, inner / values, self.bytes() as i64])
    }
}

/// Copies the bytes of a matrix `[out, in]`, row after row, into a tensor.
///
/// # Errors
/// As [`BlockType::tensor_shape`]; another number of bytes; too little memory.
pub fn from_bytes(stored: BlockType, shape: [i64; 2], bytes: &[u8]) -> Result<Tensor> {
    let size = stored.tensor_shape(shape)?;
    let expected = size.iter().product::<i64>();
    if bytes.len() as i64 != expected {
        let (given, name) = (bytes.len(), stored.name());
        return Err(refuse(format!("{given} bytes for a matrix {shape:?} in {name}; expected {expected}")));
    }
    let tensor = Tensor::f_empty(size, (stored.kind(), Device::Cpu))?;
    runtime::file::copy_values(bytes, Kind::Uint8, &tensor.f_view_dtype(Kind::Uint8)?)?;
    Ok(tensor)
}

/// Writes a window of rows and columns of Ŵ into a matrix of its shape.
pub(super) fn dequantize_window(
    stored: BlockType,
    weight: &Tensor,
    window: [Range<i64>; 2],
    out: &mut Tensor,
) -> Result<()> {
    if weight.device() != Device::Cpu {
        return Err(refuse(format!(
            "blocks in {} on {:?}; they are dequantized on a CPU only: load the model in bfloat16, or in nf4",
            stored.name(),
            weight.device()
        )));
    }
    cpu::dequantize(stored, weight, window, out)
}

/// Returns blocks with pseudo-random bytes, and factors that are finite.
#[cfg(test)]
fn test_bytes(stored: BlockType, blocks: usize, seed: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..(blocks * stored.bytes()) as u32)
        .map(|index| ((index + 7919 * seed as u32).wrapping_mul(2_654_435_761).rotate_left(13) ^ index) as u8)
        .collect();
    let factors: &[usize] = match stored {
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4K | BlockType::Q5K => &[0, 2],
        BlockType::Q2K => &[80, 82],
        BlockType::Q3K => &[108],
        BlockType::Q6K => &[208],
        _ => &[0],
    };
    for (number, block) in bytes.chunks_exact_mut(stored.bytes()).enumerate() {
        for at in factors {
            let factor = half::f16::from_f32(((number + seed + at) % 17) as f32 / 40.0 - 0.2);
            block[*at..at + 2].copy_from_slice(&factor.to_le_bytes());
        }
    }
    bytes
}
