//! Chunks in the registers of AVX-512.

use std::arch::x86_64::*;

use super::chunk::{
    CHUNK, Format, IQ4_NL, Iq4Nl, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, UNIT, UNITS, half,
    q3_k_scales, six_bits,
};

/// A chunk: the codes of 16 units in the order of the format, and the scales and minima of the units in the order of the row.
pub(super) struct Loaded {
    pub(super) codes: [__m512i; 4],
    pub(super) scales: __m512,
    pub(super) minima: __m512,
}

/// A format that these instructions read.
pub(super) trait Registers: Format {
    /// The unit at each 16 bytes of the registers.
    const ORDER: [usize; UNITS];

    /// Reads a chunk of [`Format::BYTES`].
    ///
    /// # Safety
    /// The processor has AVX-512 F, BW, VL and DQ, and F16C; there are as many bytes.
    unsafe fn load(bytes: &[u8]) -> Loaded;
}

/// The order of the row.
const IN_ORDER: [usize; UNITS] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
/// The order of four blocks of 32: the low bits of all, then the high bits.
const LOW_THEN_HIGH: [usize; UNITS] = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15];
/// The order of two pairs of groups: the low bits of both, then the high bits.
const PAIRS: [usize; UNITS] = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15];

/// Dequantizes a chunk.
///
/// # Safety
/// As [`Registers::load`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
pub(super) unsafe fn values<F: Registers>(bytes: &[u8], values: &mut [f32; CHUNK]) {
    assert_eq!(bytes.len(), F::BYTES);
    let (mut scales, mut minima) = ([0f32; UNITS], [0f32; UNITS]);
    let mut codes = [0u8; CHUNK];
    // SAFETY: by this function's contract; every store and load is of a whole array, or of 16 elements of it.
    unsafe {
        let loaded = F::load(bytes);
        _mm512_storeu_ps(scales.as_mut_ptr(), loaded.scales);
        _mm512_storeu_ps(minima.as_mut_ptr(), loaded.minima);
        for (part, quarter) in loaded.codes.into_iter().enumerate() {
            _mm512_storeu_si512(codes.as_mut_ptr().add(64 * part).cast(), quarter);
        }
        let zero = _mm512_set1_epi32(i32::from(F::ZERO));
        for (place, unit) in F::ORDER.into_iter().enumerate() {
            let sixteen = _mm_loadu_si128(codes.as_ptr().add(UNIT * place).cast());
            let code = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_cvtepu8_epi32(sixteen), zero));
            let product = _mm512_mul_ps(code, _mm512_set1_ps(scales[unit]));
            let value = _mm512_sub_ps(product, _mm512_set1_ps(minima[unit]));
            _mm512_storeu_ps(values.as_mut_ptr().add(UNIT * unit), value);
        }
    }
}

/// # Safety
/// As [`Registers::load`]; 16 bytes at `at` of each of four blocks from `first` on.
#[inline(always)]
unsafe fn of_four<const BYTES: usize>(bytes: &[u8], first: usize, at: usize) -> __m512i {
    // SAFETY: by this function's contract.
    unsafe {
        let load = |block: usize| _mm_loadu_si128(bytes.as_ptr().add(BYTES * (first + block) + at).cast());
        let low = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(load(0)), load(1));
        let high = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(load(2)), load(3));
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
    }
}

/// The low and the high four bits of each byte.
///
/// # Safety
/// As [`Registers::load`].
#[inline(always)]
unsafe fn nibbles(bytes: __m512i) -> [__m512i; 2] {
    // SAFETY: by this function's contract.
    unsafe {
        let mask = _mm512_set1_epi8(15);
        [_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask)]
    }
}

/// The fp16 at `at` of each of eight blocks, twice.
///
/// # Safety
/// As [`Registers::load`]; eight blocks.
#[inline(always)]
unsafe fn halves<const BYTES: usize>(bytes: &[u8], at: usize) -> __m512 {
    // SAFETY: by this function's contract.
    unsafe {
        let word = |block: usize| bytes.as_ptr().add(BYTES * block + at).cast::<i16>().read_unaligned();
        let eight = _mm_setr_epi16(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7));
        let (low, high) = (_mm_unpacklo_epi16(eight, eight), _mm_unpackhi_epi16(eight, eight));
        _mm512_cvtph_ps(_mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high))
    }
}

/// Codes of four bits of eight blocks.
///
/// # Safety
/// As [`halves`].
#[inline(always)]
unsafe fn codes_of_eight<const BYTES: usize>(bytes: &[u8], at: usize) -> [__m512i; 4] {
    // SAFETY: by this function's contract.
    unsafe {
        let [a, b] = nibbles(of_four::<BYTES>(bytes, 0, at));
        let [c, d] = nibbles(of_four::<BYTES>(bytes, 4, at));
        [a, b, c, d]
    }
}

/// Adds the fifth bits of eight blocks, words of 32 bits at `at`.
///
/// # Safety
/// As [`halves`].
#[inline(always)]
unsafe fn with_fifth_bits<const BYTES: usize>(
    bytes: &[u8],
    at: usize,
    mut codes: [__m512i; 4],
) -> [__m512i; 4] {
    // SAFETY: by this function's contract.
    unsafe {
        let word =
            |block: usize| u64::from(bytes.as_ptr().add(BYTES * block + at).cast::<u32>().read_unaligned());
        let sixteen = _mm512_set1_epi8(16);
        for half in 0..2 {
            let words: [u64; 4] = std::array::from_fn(|block| word(4 * half + block));
            for part in 0..2 {
                let mask =
                    words.iter().rev().fold(0, |mask, word| mask << 16 | (word >> (16 * part) & 0xffff));
                let code = &mut codes[2 * half + part];
                *code = _mm512_mask_add_epi8(*code, mask, *code, sixteen);
            }
        }
        codes
    }
}

/// The minima that are stored with the other sign.
///
/// # Safety
/// As [`halves`].
#[inline(always)]
unsafe fn negated<const BYTES: usize>(bytes: &[u8], at: usize) -> __m512 {
    // SAFETY: by this function's contract.
    unsafe { _mm512_xor_ps(halves::<BYTES>(bytes, at), _mm512_set1_ps(-0.0)) }
}

/// Implements [`Registers`] by an expression over the bytes.
macro_rules! registers {
    ($name:ident, $order:expr, |$bytes:ident| $load:expr) => {
        impl Registers for $name {
            const ORDER: [usize; UNITS] = $order;

            // SAFETY: the caller keeps the trait's contract.
            #[inline(always)]
            unsafe fn load($bytes: &[u8]) -> Loaded {
                // SAFETY: by this function's contract.
                unsafe {
                    let (codes, scales, minima) = $load;
                    Loaded { codes, scales, minima }
                }
            }
        }
    };
}

registers!(Q4_0, LOW_THEN_HIGH, |bytes| {
    (codes_of_eight::<18>(bytes, 2), halves::<18>(bytes, 0), _mm512_setzero_ps())
});
registers!(Q4_1, LOW_THEN_HIGH, |bytes| {
    (codes_of_eight::<20>(bytes, 4), halves::<20>(bytes, 0), negated::<20>(bytes, 2))
});
registers!(Q5_0, LOW_THEN_HIGH, |bytes| {
    let codes = with_fifth_bits::<22>(bytes, 2, codes_of_eight::<22>(bytes, 6));
    (codes, halves::<22>(bytes, 0), _mm512_setzero_ps())
});
registers!(Q5_1, LOW_THEN_HIGH, |bytes| {
    let codes = with_fifth_bits::<24>(bytes, 4, codes_of_eight::<24>(bytes, 8));
    (codes, halves::<24>(bytes, 0), negated::<24>(bytes, 2))
});
registers!(Iq4Nl, LOW_THEN_HIGH, |bytes| {
    let table: [u8; 16] = IQ4_NL.map(|value| value.cast_unsigned() ^ 0x80);
    let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
    let codes = codes_of_eight::<18>(bytes, 2).map(|codes| _mm512_shuffle_epi8(table, codes));
    (codes, halves::<18>(bytes, 0), _mm512_setzero_ps())
});
registers!(Q8_0, IN_ORDER, |bytes| {
    let block = |number: usize| _mm256_loadu_si256(bytes.as_ptr().add(34 * number + 2).cast());
    let codes = [0, 2, 4, 6].map(|number| {
        let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(block(number)), block(number + 1));
        _mm512_xor_si512(both, _mm512_set1_epi8(-128))
    });
    (codes, halves::<34>(bytes, 0), _mm512_setzero_ps())
});

/// Bits `shifts[0]` and on of 32 bytes, then bits `shifts[1]` and on, of as many bits as the mask has.
///
/// # Safety
/// As [`Registers::load`]; 32 bytes at `at`.
#[inline(always)]
unsafe fn bits(bytes: &[u8], at: usize, shifts: [i16; 2], mask: i8) -> __m512i {
    // SAFETY: by this function's contract.
    unsafe {
        let some = _mm512_broadcast_i64x4(_mm256_loadu_si256(bytes.as_ptr().add(at).cast()));
        let shifts = _mm512_inserti64x4::<1>(_mm512_set1_epi16(shifts[0]), _mm256_set1_epi16(shifts[1]));
        _mm512_and_si512(_mm512_srlv_epi16(some, shifts), _mm512_set1_epi8(mask))
    }
}

/// The products of d with 16 small integers.
///
/// # Safety
/// As [`Registers::load`].
#[inline(always)]
unsafe fn scaled(integers: __m512i, d: f32) -> __m512 {
    // SAFETY: by this function's contract.
    unsafe { _mm512_mul_ps(_mm512_cvtepi32_ps(integers), _mm512_set1_ps(d)) }
}

registers!(Q2K, IN_ORDER, |bytes| {
    let codes = std::array::from_fn(|part| {
        let shift = 4 * (part as i16 % 2);
        bits(bytes, 16 + 32 * (part / 2), [shift, shift + 2], 3)
    });
    let packed = _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()));
    let low = _mm512_and_si512(packed, _mm512_set1_epi32(15));
    (codes, scaled(low, half(bytes, 80)), scaled(_mm512_srli_epi32::<4>(packed), half(bytes, 82)))
});
registers!(Q3K, IN_ORDER, |bytes| {
    let codes = std::array::from_fn(|part| {
        let shift = 4 * (part as i16 % 2);
        let low = bits(bytes, 32 + 32 * (part / 2), [shift, shift + 2], 3);
        let third = bits(bytes, 0, [2 * part as i16, 2 * part as i16 + 1], 1);
        _mm512_or_si512(low, _mm512_slli_epi16::<2>(third))
    });
    (codes, _mm512_loadu_ps(q3_k_scales(bytes).as_ptr()), _mm512_setzero_ps())
});

/// The scales and minima of `Q4_K` and `Q5_K`.
///
/// # Safety
/// As [`Registers::load`].
#[inline(always)]
unsafe fn scales_of_six_bits(bytes: &[u8]) -> [__m512; 2] {
    // SAFETY: by this function's contract.
    unsafe {
        let [scales, minima] = six_bits(&bytes[4..16]);
        let twice = |eight: [u8; 8]| {
            let eight = _mm_cvtsi64_si128(i64::from_le_bytes(eight));
            _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(eight, eight))
        };
        [scaled(twice(scales), half(bytes, 0)), scaled(twice(minima), half(bytes, 2))]
    }
}

registers!(Q4K, PAIRS, |bytes| {
    let [scales, minima] = scales_of_six_bits(bytes);
    let [a, b] = nibbles(_mm512_loadu_si512(bytes.as_ptr().add(16).cast()));
    let [c, d] = nibbles(_mm512_loadu_si512(bytes.as_ptr().add(80).cast()));
    ([a, b, c, d], scales, minima)
});
registers!(Q5K, PAIRS, |bytes| {
    let [scales, minima] = scales_of_six_bits(bytes);
    let [a, b] = nibbles(_mm512_loadu_si512(bytes.as_ptr().add(48).cast()));
    let [c, d] = nibbles(_mm512_loadu_si512(bytes.as_ptr().add(112).cast()));
    let with = |low: __m512i, groups: [i16; 2]| {
        _mm512_or_si512(low, _mm512_slli_epi16::<4>(bits(bytes, 16, groups, 1)))
    };
    ([with(a, [0, 2]), with(b, [1, 3]), with(c, [4, 6]), with(d, [5, 7])], scales, minima)
});
registers!(Q6K, IN_ORDER, |bytes| {
    let [a, b] = nibbles(_mm512_loadu_si512(bytes.as_ptr().cast()));
    let [c, d] = nibbles(_mm512_loadu_si512(bytes.as_ptr().add(64).cast()));
    let with = |low: __m512i, at: usize, shifts: [i16; 2]| {
        _mm512_or_si512(low, _mm512_slli_epi16::<4>(bits(bytes, at, shifts, 3)))
    };
    let codes = [with(a, 128, [0, 2]), with(b, 128, [4, 6]), with(c, 160, [0, 2]), with(d, 160, [4, 6])];
    let scales = _mm512_cvtepi8_epi32(_mm_loadu_si128(bytes.as_ptr().add(192).cast()));
    (codes, scaled(scales, half(bytes, 208)), _mm512_setzero_ps())
});
