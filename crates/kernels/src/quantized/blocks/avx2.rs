//! Chunks in the registers of AVX2.

use std::arch::x86_64::*;

use super::BlockType;
use super::chunk::{
    Format, IQ4_NL, Iq4Nl, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, UNITS, half, q3_k_scales,
    six_bits,
};

/// A chunk: c − z of 16 units as signed bytes, in the order of the format, and the scales and minima of the units in the order of the row.
pub(super) struct Loaded {
    pub(super) codes: [__m256i; UNITS / 2],
    pub(super) scales: [__m256; 2],
    pub(super) minima: [__m256; 2],
}

/// A format that these instructions read.
pub(super) trait Registers: Format {
    /// Where each of the four units of two registers is, in halves of registers.
    const ORDER: [usize; 4];
    /// Whether two units, from an even one on, have the same scale.
    const PAIRS: bool = Self::TYPE.values() == 32 || matches!(Self::TYPE, BlockType::Q4K | BlockType::Q5K);

    /// Reads a chunk of [`Format::BYTES`].
    ///
    /// # Safety
    /// The processor has AVX2 and F16C; there are as many bytes.
    unsafe fn load(bytes: &[u8]) -> Loaded;
}

/// The order of the row.
const IN_ORDER: [usize; 4] = [0, 1, 2, 3];
/// The order of two blocks of 32: the low bits of both, then the high bits.
const LOW_THEN_HIGH: [usize; 4] = [0, 2, 1, 3];

/// Implements [`Registers`] by an expression over the bytes.
macro_rules! registers {
    ($name:ident, $order:expr, |$bytes:ident| $load:expr) => {
        impl Registers for $name {
            const ORDER: [usize; 4] = $order;

            // SAFETY: the caller keeps the trait's contract.
            #[inline(always)]
            unsafe fn load($bytes: &[u8]) -> Loaded {
                // SAFETY: by this function's contract.
                unsafe {
                    let (codes, scales, minima) = $load;
                    let zero = _mm256_set1_epi8(Self::ZERO.cast_signed());
                    let mut centred = codes;
                    if Self::ZERO != 0 {
                        for codes in &mut centred {
                            *codes = _mm256_sub_epi8(*codes, zero);
                        }
                    }
                    Loaded { codes: centred, scales, minima }
                }
            }
        }
    };
}

/// The low and the high four bits of each byte.
///
/// # Safety
/// As [`Registers::load`].
#[inline(always)]
unsafe fn nibbles(bytes: __m256i) -> [__m256i; 2] {
    // SAFETY: by this function's contract.
    unsafe {
        let mask = _mm256_set1_epi8(15);
        [_mm256_and_si256(bytes, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask)]
    }
}

/// Codes of four bits of eight blocks, from `at` on in each.
///
/// # Safety
/// As [`Registers::load`]; eight blocks.
#[inline(always)]
unsafe fn codes_of_eight<const BYTES: usize>(bytes: &[u8], at: usize) -> [__m256i; 8] {
    // SAFETY: by this function's contract.
    unsafe {
        let load = |block: usize| _mm_loadu_si128(bytes.as_ptr().add(BYTES * block + at).cast());
        let two = |block: usize| {
            nibbles(_mm256_inserti128_si256::<1>(_mm256_castsi128_si256(load(block)), load(block + 1)))
        };
        let ([a, b], [c, d], [e, f], [g, h]) = (two(0), two(2), two(4), two(6));
        [a, b, c, d, e, f, g, h]
    }
}

/// Adds the fifth bits of eight blocks, words of 32 bits at `at`.
///
/// # Safety
/// As [`codes_of_eight`].
#[inline(always)]
unsafe fn with_fifth_bits<const BYTES: usize>(
    bytes: &[u8],
    at: usize,
    mut codes: [__m256i; 8],
) -> [__m256i; 8] {
    // SAFETY: by this function's contract.
    unsafe {
        let word = |block: usize| bytes.as_ptr().add(BYTES * block + at).cast::<i32>().read_unaligned();
        // Of each word the bytes 0 and 1 eight times, or 2 and 3.
        let bits = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
        for pair in 0..4 {
            let both = _mm256_setr_epi32(word(2 * pair), 0, 0, 0, word(2 * pair + 1), 0, 0, 0);
            for part in 0..2 {
                let (low, high) = ((2 * part) as i8, (2 * part + 1) as i8);
                let spread = _mm256_setr_epi8(
                    low, low, low, low, low, low, low, low, high, high, high, high, high, high, high, high,
                    low, low, low, low, low, low, low, low, high, high, high, high, high, high, high, high,
                );
                let there = _mm256_and_si256(_mm256_shuffle_epi8(both, spread), bits);
                let fifth = _mm256_and_si256(_mm256_cmpeq_epi8(there, bits), _mm256_set1_epi8(16));
                let code = &mut codes[2 * pair + part];
                *code = _mm256_or_si256(*code, fifth);
            }
        }
        codes
    }
}

/// The fp16 at `at` of each of eight blocks, twice.
///
/// # Safety
/// As [`codes_of_eight`].
#[inline(always)]
unsafe fn halves<const BYTES: usize>(bytes: &[u8], at: usize) -> [__m256; 2] {
    // SAFETY: by this function's contract.
    unsafe {
        let word = |block: usize| bytes.as_ptr().add(BYTES * block + at).cast::<i16>().read_unaligned();
        let eight = _mm_setr_epi16(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7));
        [_mm256_cvtph_ps(_mm_unpacklo_epi16(eight, eight)), _mm256_cvtph_ps(_mm_unpackhi_epi16(eight, eight))]
    }
}

/// The minima that are stored with the other sign.
///
/// # Safety
/// As [`codes_of_eight`].
#[inline(always)]
unsafe fn negated<const BYTES: usize>(bytes: &[u8], at: usize) -> [__m256; 2] {
    // SAFETY: by this function's contract.
    unsafe { halves::<BYTES>(bytes, at).map(|minima| _mm256_xor_ps(minima, _mm256_set1_ps(-0.0))) }
}

/// # Safety
/// As [`Registers::load`].
#[inline(always)]
unsafe fn nothing() -> [__m256; 2] {
    // SAFETY: by this function's contract.
    unsafe { [_mm256_setzero_ps(); 2] }
}

registers!(Q4_0, LOW_THEN_HIGH, |bytes| {
    (codes_of_eight::<18>(bytes, 2), halves::<18>(bytes, 0), nothing())
});
registers!(Q4_1, LOW_THEN_HIGH, |bytes| {
    (codes_of_eight::<20>(bytes, 4), halves::<20>(bytes, 0), negated::<20>(bytes, 2))
});
registers!(Q5_0, LOW_THEN_HIGH, |bytes| {
    let codes = with_fifth_bits::<22>(bytes, 2, codes_of_eight::<22>(bytes, 6));
    (codes, halves::<22>(bytes, 0), nothing())
});
registers!(Q5_1, LOW_THEN_HIGH, |bytes| {
    let codes = with_fifth_bits::<24>(bytes, 4, codes_of_eight::<24>(bytes, 8));
    (codes, halves::<24>(bytes, 0), negated::<24>(bytes, 2))
});
registers!(Iq4Nl, LOW_THEN_HIGH, |bytes| {
    let table: [u8; 16] = IQ4_NL.map(|value| value.cast_unsigned() ^ 0x80);
    let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
    let mut codes = codes_of_eight::<18>(bytes, 2);
    for codes in &mut codes {
        *codes = _mm256_shuffle_epi8(table, *codes);
    }
    (codes, halves::<18>(bytes, 0), nothing())
});
registers!(Q8_0, IN_ORDER, |bytes| {
    let mut codes = [_mm256_setzero_si256(); 8];
    for (block, codes) in codes.iter_mut().enumerate() {
        let signed = _mm256_loadu_si256(bytes.as_ptr().add(34 * block + 2).cast());
        *codes = _mm256_xor_si256(signed, _mm256_set1_epi8(-128));
    }
    (codes, halves::<34>(bytes, 0), nothing())
});

/// Bits `shift` and on of the 32 bytes at `at`, of as many bits as the mask has.
///
/// # Safety
/// As [`Registers::load`]; 32 bytes at `at`.
#[inline(always)]
unsafe fn bits<const SHIFT: i32>(bytes: &[u8], at: usize, mask: i8) -> __m256i {
    // SAFETY: by this function's contract.
    unsafe {
        let some = _mm256_loadu_si256(bytes.as_ptr().add(at).cast());
        _mm256_and_si256(_mm256_srli_epi16::<SHIFT>(some), _mm256_set1_epi8(mask))
    }
}

/// The bits of each group of 32, `1 << group` of 32 bytes at `at`, as 0 or `value`.
///
/// # Safety
/// As [`bits`].
#[inline(always)]
unsafe fn bit(bytes: &[u8], at: usize, group: usize, value: i8) -> __m256i {
    // SAFETY: by this function's contract.
    unsafe {
        let some = _mm256_loadu_si256(bytes.as_ptr().add(at).cast());
        let wanted = _mm256_set1_epi8((1u8 << group).cast_signed());
        let there = _mm256_cmpeq_epi8(_mm256_and_si256(some, wanted), wanted);
        _mm256_and_si256(there, _mm256_set1_epi8(value))
    }
}

/// The products of d with 16 small integers, bytes without a sign.
///
/// # Safety
/// As [`Registers::load`].
#[inline(always)]
unsafe fn scaled(integers: __m128i, d: f32) -> [__m256; 2] {
    // SAFETY: by this function's contract.
    unsafe {
        [integers, _mm_unpackhi_epi64(integers, integers)]
            .map(|eight| _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight)), _mm256_set1_ps(d)))
    }
}

/// The codes of two bits of `Q2_K` and `Q3_K`.
///
/// # Safety
/// As [`Registers::load`]; 64 bytes at `at`.
#[inline(always)]
unsafe fn two_bits(bytes: &[u8], at: usize) -> [__m256i; 8] {
    // SAFETY: by this function's contract.
    unsafe {
        let four = |at: usize| {
            [
                bits::<0>(bytes, at, 3),
                bits::<2>(bytes, at, 3),
                bits::<4>(bytes, at, 3),
                bits::<6>(bytes, at, 3),
            ]
        };
        let ([a, b, c, d], [e, f, g, h]) = (four(at), four(at + 32));
        [a, b, c, d, e, f, g, h]
    }
}

registers!(Q2K, IN_ORDER, |bytes| {
    let packed = _mm_loadu_si128(bytes.as_ptr().cast());
    let mask = _mm_set1_epi8(15);
    let (low, high) = (_mm_and_si128(packed, mask), _mm_and_si128(_mm_srli_epi16::<4>(packed), mask));
    (two_bits(bytes, 16), scaled(low, half(bytes, 80)), scaled(high, half(bytes, 82)))
});
registers!(Q3K, IN_ORDER, |bytes| {
    let mut codes = two_bits(bytes, 32);
    for (group, codes) in codes.iter_mut().enumerate() {
        *codes = _mm256_or_si256(*codes, bit(bytes, 0, group, 4));
    }
    let scales = q3_k_scales(bytes);
    (codes, [_mm256_loadu_ps(scales.as_ptr()), _mm256_loadu_ps(scales.as_ptr().add(8))], nothing())
});

/// The scales and minima of `Q4_K` and `Q5_K`.
///
/// # Safety
/// As [`Registers::load`].
#[inline(always)]
unsafe fn scales_of_six_bits(bytes: &[u8]) -> [[__m256; 2]; 2] {
    // SAFETY: by this function's contract.
    unsafe {
        let [scales, minima] = six_bits(&bytes[4..16]);
        let twice = |eight: [u8; 8]| {
            let eight = _mm_cvtsi64_si128(i64::from_le_bytes(eight));
            _mm_unpacklo_epi8(eight, eight)
        };
        [scaled(twice(scales), half(bytes, 0)), scaled(twice(minima), half(bytes, 2))]
    }
}

/// The low and the high bits of 128 bytes at `at`, 32 at a time: the groups in order.
///
/// # Safety
/// As [`Registers::load`]; 128 bytes at `at`.
#[inline(always)]
unsafe fn pairs_of_groups(bytes: &[u8], at: usize) -> [__m256i; 8] {
    // SAFETY: by this function's contract.
    unsafe {
        let pair = |number: usize| nibbles(_mm256_loadu_si256(bytes.as_ptr().add(at + 32 * number).cast()));
        let ([a, b], [c, d], [e, f], [g, h]) = (pair(0), pair(1), pair(2), pair(3));
        [a, b, c, d, e, f, g, h]
    }
}

registers!(Q4K, IN_ORDER, |bytes| {
    let [scales, minima] = scales_of_six_bits(bytes);
    (pairs_of_groups(bytes, 16), scales, minima)
});
registers!(Q5K, IN_ORDER, |bytes| {
    let [scales, minima] = scales_of_six_bits(bytes);
    let mut codes = pairs_of_groups(bytes, 48);
    for (group, codes) in codes.iter_mut().enumerate() {
        *codes = _mm256_or_si256(*codes, bit(bytes, 16, group, 16));
    }
    (codes, scales, minima)
});
/// 128 codes of `Q6_K`: the low four bits of 64 bytes at `low`, the high two bits of 32 at `high`.
///
/// # Safety
/// As [`Registers::load`]; that many bytes.
#[inline(always)]
unsafe fn six_bit_codes(bytes: &[u8], low: usize, high: usize) -> [__m256i; 4] {
    // SAFETY: by this function's contract.
    unsafe {
        let [a, c] = nibbles(_mm256_loadu_si256(bytes.as_ptr().add(low).cast()));
        let [b, d] = nibbles(_mm256_loadu_si256(bytes.as_ptr().add(low + 32).cast()));
        let [e, f, g, h] = [
            bits::<0>(bytes, high, 3),
            bits::<2>(bytes, high, 3),
            bits::<4>(bytes, high, 3),
            bits::<6>(bytes, high, 3),
        ];
        [
            _mm256_or_si256(a, _mm256_slli_epi16::<4>(e)),
            _mm256_or_si256(b, _mm256_slli_epi16::<4>(f)),
            _mm256_or_si256(c, _mm256_slli_epi16::<4>(g)),
            _mm256_or_si256(d, _mm256_slli_epi16::<4>(h)),
        ]
    }
}

registers!(Q6K, IN_ORDER, |bytes| {
    let ([a, b, c, d], [e, f, g, h]) = (six_bit_codes(bytes, 0, 128), six_bit_codes(bytes, 64, 160));
    let packed = _mm_loadu_si128(bytes.as_ptr().add(192).cast());
    let d8 = _mm256_set1_ps(half(bytes, 208));
    let first = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(packed)), d8);
    let last =
        _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(packed, packed))), d8);
    ([a, b, c, d, e, f, g, h], [first, last], nothing())
});
