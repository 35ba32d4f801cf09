//! 256 weights of a row: their codes, scales and minima, read from the blocks of each type.
//!
//! The code is written so that the compiler vectorizes it for the instructions that it is dispatched to.

use half::f16;

use super::BlockType;
use crate::simd::Element;

/// Weights of a chunk, and of a unit, which shares a scale and a minimum.
pub(super) const CHUNK: usize = 256;
pub(super) const UNIT: usize = 16;
pub(super) const UNITS: usize = CHUNK / UNIT;

/// The values of the codes of `IQ4_NL`.
pub(super) const IQ4_NL: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// ŵ = scale·(code − zero) − minimum.
pub(super) struct Chunk {
    pub(super) codes: [u8; CHUNK],
    pub(super) scales: [f32; UNITS],
    pub(super) minima: [f32; UNITS],
}

impl Chunk {
    pub(super) const EMPTY: Self = Self { codes: [0; CHUNK], scales: [0.0; UNITS], minima: [0.0; UNITS] };
}

/// A type of blocks.
pub(super) trait Format: Sync {
    const TYPE: BlockType;
    /// Bytes of a chunk.
    const BYTES: usize = Self::TYPE.bytes() * (CHUNK / Self::TYPE.values());
    const ZERO: u8;
    /// Whether the type has minima.
    const HAS_MINIMA: bool;

    /// Reads a chunk of [`Format::BYTES`].
    fn read(bytes: &[u8], chunk: &mut Chunk);
}

/// Returns where a chunk of a row begins, in weights or bytes as both sizes are. The last chunk of a row that is no multiple of chunks is the
/// last 256 weights, and begins within the chunk before it.
#[inline(always)]
pub(super) fn chunk_start(number: usize, chunk: usize, length: usize) -> usize {
    (number * chunk).min(length.saturating_sub(chunk))
}

/// Divides a vector into the chunks that products read: numbers that an earlier chunk has, and numbers beyond a vector shorter than a chunk, are
/// zero.
pub(super) fn chunks<T: Copy + Default>(x: &[T]) -> impl Iterator<Item = [T; CHUNK]> {
    (0..x.len().div_ceil(CHUNK)).map(|number| {
        let start = chunk_start(number, CHUNK, x.len());
        let mut chunk = [T::default(); CHUNK];
        let (new, end) = (number * CHUNK, x.len().min((number + 1) * CHUNK));
        chunk[new - start..end - start].copy_from_slice(&x[new..end]);
        chunk
    })
}

/// Reads an fp16 in fp32.
#[inline(always)]
pub(super) fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).widen()
}

/// Reads eight blocks of 32 weights; `block` writes the codes of one, and returns its scale and minimum.
#[inline(always)]
fn eight<const BYTES: usize>(
    bytes: &[u8],
    chunk: &mut Chunk,
    block: impl Fn(&[u8; BYTES], &mut [u8; 32]) -> [f32; 2],
) {
    let (blocks, codes) = (&bytes.as_chunks::<BYTES>().0[..8], chunk.codes.as_chunks_mut::<32>().0);
    for (number, (from, codes)) in blocks.iter().zip(codes).enumerate() {
        let [scale, minimum] = block(from, codes);
        for unit in [2 * number, 2 * number + 1] {
            (chunk.scales[unit], chunk.minima[unit]) = (scale, minimum);
        }
    }
}

/// Writes the codes of 16 bytes: the low four bits of all, then the high ones.
#[inline(always)]
fn nibbles(bytes: &[u8], codes: &mut [u8; 32]) {
    for (at, byte) in bytes[..16].iter().enumerate() {
        codes[at] = byte & 15;
        codes[at + 16] = byte >> 4;
    }
}

/// Adds the fifth bits: bit j of a word belongs to the j-th code.
#[inline(always)]
fn fifth_bits(bytes: &[u8], codes: &mut [u8; 32]) {
    let word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    for (at, code) in codes.iter_mut().enumerate() {
        *code |= ((word >> at & 1) << 4) as u8;
    }
}

macro_rules! format_of_32 {
    ($name:ident, $stored:ident, $bytes:literal, $zero:literal, $minima:literal, |$block:ident, $codes:ident| $read:block) => {
        pub(super) struct $name;

        impl Format for $name {
            const TYPE: BlockType = BlockType::$stored;
            const ZERO: u8 = $zero;
            const HAS_MINIMA: bool = $minima;

            #[inline(always)]
            fn read(bytes: &[u8], chunk: &mut Chunk) {
                eight::<$bytes>(
                    bytes,
                    chunk,
                    #[inline(always)]
                    |$block, $codes| $read,
                );
            }
        }
    };
}

format_of_32!(Q4_0, Q4_0, 18, 8, false, |block, codes| {
    nibbles(&block[2..], codes);
    [half(block, 0), 0.0]
});
format_of_32!(Q4_1, Q4_1, 20, 0, true, |block, codes| {
    nibbles(&block[4..], codes);
    [half(block, 0), -half(block, 2)]
});
format_of_32!(Q5_0, Q5_0, 22, 16, false, |block, codes| {
    nibbles(&block[6..], codes);
    fifth_bits(&block[2..], codes);
    [half(block, 0), 0.0]
});
format_of_32!(Q5_1, Q5_1, 24, 0, true, |block, codes| {
    nibbles(&block[8..], codes);
    fifth_bits(&block[4..], codes);
    [half(block, 0), -half(block, 2)]
});
format_of_32!(Q8_0, Q8_0, 34, 128, false, |block, codes| {
    for (code, byte) in codes.iter_mut().zip(&block[2..]) {
        *code = byte ^ 0x80;
    }
    [half(block, 0), 0.0]
});
format_of_32!(Iq4Nl, Iq4Nl, 18, 128, false, |block, codes| {
    nibbles(&block[2..], codes);
    for code in codes.iter_mut() {
        *code = IQ4_NL[usize::from(*code)].cast_unsigned() ^ 0x80;
    }
    [half(block, 0), 0.0]
});

pub(super) struct Q2K;

/// scales and minima of 4 bits [16], codes [64] of 2 bits, d, d': weight 128h + 32j + l is bits 2j of byte 32h + l.
impl Format for Q2K {
    const TYPE: BlockType = BlockType::Q2K;
    const ZERO: u8 = 0;
    const HAS_MINIMA: bool = true;

    #[inline(always)]
    fn read(bytes: &[u8], chunk: &mut Chunk) {
        let (d, least) = (half(bytes, 80), half(bytes, 82));
        for (unit, byte) in bytes[..UNITS].iter().enumerate() {
            chunk.scales[unit] = d * f32::from(byte & 15);
            chunk.minima[unit] = least * f32::from(byte >> 4);
        }
        two_bits(&bytes[16..80], &mut chunk.codes);
    }
}

/// The codes of two bits of `Q2_K` and `Q3_K`.
#[inline(always)]
fn two_bits(bytes: &[u8], codes: &mut [u8; CHUNK]) {
    for (group, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let from = &bytes[32 * (group / 4)..][..32];
        for (code, byte) in codes.iter_mut().zip(from) {
            *code = byte >> (2 * (group % 4)) & 3;
        }
    }
}

pub(super) struct Q3K;

/// third bits [32], codes of 2 bits [64] as in `Q2_K`, scales of 6 bits [12], d. A third bit adds 4, and 4 is the zero.
impl Format for Q3K {
    const TYPE: BlockType = BlockType::Q3K;
    const ZERO: u8 = 4;
    const HAS_MINIMA: bool = false;

    #[inline(always)]
    fn read(bytes: &[u8], chunk: &mut Chunk) {
        two_bits(&bytes[32..96], &mut chunk.codes);
        for (group, codes) in chunk.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (code, byte) in codes.iter_mut().zip(&bytes[..32]) {
                *code |= (byte >> group & 1) << 2;
            }
        }
        chunk.scales = q3_k_scales(bytes);
        chunk.minima = [0.0; UNITS];
    }
}

/// Returns d·(scale − 32) of each unit. The low four bits of the scales are in 8 bytes, those of the first eight below, and the high two bits
/// in 4 bytes.
#[inline(always)]
pub(super) fn q3_k_scales(bytes: &[u8]) -> [f32; UNITS] {
    let (packed, d) = (&bytes[96..108], half(bytes, 108));
    std::array::from_fn(|unit| {
        let low = packed[unit % 8] >> (4 * (unit / 8)) & 15;
        let high = packed[8 + unit % 4] >> (2 * (unit / 4)) & 3;
        d * (f32::from(low | high << 4) - 32.0)
    })
}

/// Returns the scales and the minima of the eight groups of `Q4_K` and `Q5_K`, of 6 bits each, as bytes: of the first four the low six bits of
/// bytes 0 to 3 and 4 to 7; of the others the halves of bytes 8 to 11, and above them the high two bits of the first ones.
#[inline(always)]
pub(super) fn six_bits(packed: &[u8]) -> [[u8; 8]; 2] {
    let word = |at: usize| u32::from_le_bytes([packed[at], packed[at + 1], packed[at + 2], packed[at + 3]]);
    let (first, second, third) = (word(0), word(4), word(8));
    let join = |low: u32, high: u32| (u64::from(high) << 32 | u64::from(low)).to_le_bytes();
    let (six, four, two) = (0x3f3f_3f3f, 0x0f0f_0f0f, 0x3030_3030);
    [
        join(first & six, third & four | first >> 2 & two),
        join(second & six, third >> 4 & four | second >> 2 & two),
    ]
}

#[inline(always)]
fn scales_of_six_bits(bytes: &[u8], chunk: &mut Chunk) {
    let (d, least) = (half(bytes, 0), half(bytes, 2));
    let [scales, minima] = six_bits(&bytes[4..16]);
    for unit in 0..UNITS {
        chunk.scales[unit] = d * f32::from(scales[unit / 2]);
        chunk.minima[unit] = least * f32::from(minima[unit / 2]);
    }
}

/// The codes of four bits of `Q4_K` and `Q5_K`: groups 2p and 2p + 1 are the low and the high bits of the p-th 32 bytes.
#[inline(always)]
fn pairs_of_groups(bytes: &[u8], codes: &mut [u8; CHUNK]) {
    for (pair, codes) in codes.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        for (at, byte) in bytes[32 * pair..][..32].iter().enumerate() {
            codes[at] = byte & 15;
            codes[at + 32] = byte >> 4;
        }
    }
}

pub(super) struct Q4K;

/// d, d', scales and minima [12], codes [128].
impl Format for Q4K {
    const TYPE: BlockType = BlockType::Q4K;
    const ZERO: u8 = 0;
    const HAS_MINIMA: bool = true;

    #[inline(always)]
    fn read(bytes: &[u8], chunk: &mut Chunk) {
        scales_of_six_bits(bytes, chunk);
        pairs_of_groups(&bytes[16..144], &mut chunk.codes);
    }
}

pub(super) struct Q5K;

/// d, d', scales and minima [12], fifth bits [32], codes [128]; the fifth bits of group g are bits g of their bytes.
impl Format for Q5K {
    const TYPE: BlockType = BlockType::Q5K;
    const ZERO: u8 = 0;
    const HAS_MINIMA: bool = true;

    #[inline(always)]
    fn read(bytes: &[u8], chunk: &mut Chunk) {
        scales_of_six_bits(bytes, chunk);
        pairs_of_groups(&bytes[48..176], &mut chunk.codes);
        for (group, codes) in chunk.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (code, byte) in codes.iter_mut().zip(&bytes[16..48]) {
                *code |= (byte >> group & 1) << 4;
            }
        }
    }
}

pub(super) struct Q6K;

/// low four bits [128], high two bits [64], scales i8 [16], d. Of each half of 128 weights the low bits of 64 bytes come first, then the high
/// ones; bits 2j of 32 bytes belong to the j-th 32 weights.
impl Format for Q6K {
    const TYPE: BlockType = BlockType::Q6K;
    const ZERO: u8 = 32;
    const HAS_MINIMA: bool = false;

    #[inline(always)]
    fn read(bytes: &[u8], chunk: &mut Chunk) {
        for (number, codes) in chunk.codes.as_chunks_mut::<128>().0.iter_mut().enumerate() {
            let (low, high) = (&bytes[64 * number..][..64], &bytes[128 + 32 * number..][..32]);
            for (at, byte) in low.iter().enumerate() {
                codes[at] = byte & 15;
                codes[at + 64] = byte >> 4;
            }
            for (group, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                for (code, byte) in codes.iter_mut().zip(high) {
                    *code |= (byte >> (2 * group) & 3) << 4;
                }
            }
        }
        let d = half(bytes, 208);
        for unit in 0..UNITS {
            chunk.scales[unit] = d * f32::from(bytes[192 + unit].cast_signed());
        }
        chunk.minima = [0.0; UNITS];
    }
}

/// Evaluates an expression with the [`Format`] of a type.
macro_rules! with_format {
    ($stored:expr, |$format:ident| $body:expr) => {{
        use $crate::quantized::blocks::{BlockType, chunk};
        match $stored {
            BlockType::Q4_0 => {
                type $format = chunk::Q4_0;
                $body
            }
            BlockType::Q4_1 => {
                type $format = chunk::Q4_1;
                $body
            }
            BlockType::Q5_0 => {
                type $format = chunk::Q5_0;
                $body
            }
            BlockType::Q5_1 => {
                type $format = chunk::Q5_1;
                $body
            }
            BlockType::Q8_0 => {
                type $format = chunk::Q8_0;
                $body
            }
            BlockType::Q2K => {
                type $format = chunk::Q2K;
                $body
            }
            BlockType::Q3K => {
                type $format = chunk::Q3K;
                $body
            }
            BlockType::Q4K => {
                type $format = chunk::Q4K;
                $body
            }
            BlockType::Q5K => {
                type $format = chunk::Q5K;
                $body
            }
            BlockType::Q6K => {
                type $format = chunk::Q6K;
                $body
            }
            BlockType::Iq4Nl => {
                type $format = chunk::Iq4Nl;
                $body
            }
        }
    }};
}
pub(super) use with_format;
