//! The kernels for AVX2 and AVX-512: the table is in registers, and codes are looked up by a permutation.

use std::arch::x86_64::*;

use half::bf16;

use super::matvec::Row;
use super::{BLOCK, BYTES, Packed, fill_by};
use crate::matvec::streams::VECTORS;
use crate::nf4::TABLE;
use crate::simd::{Element, PREFETCHED, pairs, prefetch_line};

/// # Safety
/// The processor has AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn fill_avx512<E: Element<Compute = f32>>(
    packed: &Packed<'_>,
    start: usize,
    out: &mut [E],
) {
    // SAFETY: by this function's contract; the table has 16 values.
    let table = unsafe { _mm512_loadu_ps(TABLE.as_ptr()) };
    fill_by(
        packed,
        start,
        out,
        #[inline(always)]
        |codes, scale, values| {
            // SAFETY: by the function's contract; each load reads eight of 32 bytes, and each store writes 16 of 64 values.
            unsafe {
                let scale = _mm512_set1_ps(scale);
                for group in 0..BYTES / 8 {
                    let bytes = _mm_loadl_epi64(codes.as_ptr().add(8 * group).cast());
                    // A lookup reads the lowest four bits of an index.
                    let index = _mm_unpacklo_epi8(_mm_srli_epi16::<4>(bytes), bytes);
                    let value = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(index), table);
                    _mm512_storeu_ps(values.as_mut_ptr().add(16 * group), _mm512_mul_ps(value, scale));
                }
            }
        },
    );
}

/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn fill_avx2<E: Element<Compute = f32>>(packed: &Packed<'_>, start: usize, out: &mut [E]) {
    // SAFETY: by this function's contract; the table has 16 values.
    let (table, shifts) = unsafe { (table_avx2(), _mm256_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24)) };
    fill_by(
        packed,
        start,
        out,
        #[inline(always)]
        |codes, scale, values| {
            // SAFETY: by the function's contract; each store writes 8 of 64 values.
            unsafe {
                let scale = _mm256_set1_ps(scale);
                for (group, bytes) in codes.as_chunks::<4>().0.iter().enumerate() {
                    let index = _mm256_srlv_epi32(_mm256_set1_epi32(i32::from_le_bytes(*bytes)), shifts);
                    let value = look_up_avx2(table, index);
                    _mm256_storeu_ps(values.as_mut_ptr().add(8 * group), _mm256_mul_ps(value, scale));
                }
            }
        },
    );
}

/// Products of R rows of whole blocks with N vectors, which are arranged. Several rows at a time share the loads of the vectors, and hide
/// the latency of the sums.
///
/// # Safety
/// The processor has AVX-512 F and DQ; each row's codes have 32 bytes, and vectors 64 values, for each of its scales.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn dots_avx512<const R: usize, const N: usize>(
    rows: &[Row<'_>; R],
    x: [&[f32]; N],
    out: &mut [[f32; VECTORS]; R],
) {
    let words = rows[0].codes.len() / 4;
    // SAFETY: by this function's contract: `at` is a word of a block, and lanes beyond the last word are masked.
    unsafe {
        let table = _mm512_loadu_ps(TABLE.as_ptr());
        let mut sums = [[_mm512_setzero_ps(); N]; R];
        for at in (0..words).step_by(16) {
            // One block is eight words.
            let is_pair = at + 16 <= words;
            let mask = if is_pair { 0xffff } else { 0x00ff };
            let mut word = [_mm512_setzero_si512(); R];
            for (word, row) in word.iter_mut().zip(rows) {
                _mm_prefetch::<_MM_HINT_T0>(row.codes.as_ptr().wrapping_add(4 * at + PREFETCHED).cast());
                *word = _mm512_maskz_loadu_epi32(mask, row.codes.as_ptr().add(4 * at).cast());
            }
            let mut block_sums = [[_mm512_setzero_ps(); N]; R];
            for part in 0..8 {
                let mut value = [_mm512_setzero_ps(); R];
                for row in 0..R {
                    value[row] = _mm512_permutexvar_ps(word[row], table);
                    word[row] = _mm512_srli_epi32::<4>(word[row]);
                }
                for vector in 0..N {
                    let x = _mm512_maskz_loadu_ps(mask, x[vector].as_ptr().add(part * words + at));
                    for row in 0..R {
                        block_sums[row][vector] = _mm512_fmadd_ps(value[row], x, block_sums[row][vector]);
                    }
                }
            }
            for row in 0..R {
                let scales = &rows[row].scales[at / 8..];
                let second = if is_pair { scales[1] } else { 0.0 };
                let scale = _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(scales[0]), _mm512_set1_ps(second));
                for vector in 0..N {
                    sums[row][vector] = _mm512_fmadd_ps(block_sums[row][vector], scale, sums[row][vector]);
                }
            }
        }
        for (out, sums) in out.iter_mut().zip(&sums) {
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = _mm512_reduce_add_ps(*sum);
            }
        }
    }
}

/// [`dots_avx512`] with vectors in bf16, which are arranged in pairs: the 32 words of 16 bits of a register look up values in bf16, and
/// each instruction adds the products of two neighbours, which are of one block.
///
/// # Safety
/// The processor has AVX-512 F, BW, DQ and BF16; all rows have as many scales, and each row's codes have 32 bytes, and vectors 64
/// values, for each of its scales.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn dots_bf16<const R: usize, const N: usize>(
    rows: &[Row<'_>; R],
    x: [&[bf16]; N],
    out: &mut [[f32; VECTORS]; R],
) {
    let blocks = rows[0].scales.len();
    // A lookup reads five bits of an index: the table is there twice.
    let table: [bf16; 32] = std::array::from_fn(|code| bf16::from_f32(TABLE[code % 16]));
    // SAFETY: by this function's contract.
    unsafe {
        let table = _mm512_loadu_si512(table.as_ptr().cast());
        let mut sums = [[_mm512_setzero_ps(); N]; R];
        for pair in 0..blocks / 2 {
            add_blocks::<R, N, true>(&mut sums, (rows, &x), 2 * pair, table);
        }
        if blocks % 2 == 1 {
            add_blocks::<R, N, false>(&mut sums, (rows, &x), blocks - 1, table);
        }
        for (out, sums) in out.iter_mut().zip(&sums) {
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = _mm512_reduce_add_ps(*sum);
            }
        }
    }
}

/// Adds the products of a block, or of a pair of blocks.
///
/// # Safety
/// As [`dots_bf16`]; there are these blocks.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
#[inline]
unsafe fn add_blocks<const R: usize, const N: usize, const PAIR: bool>(
    sums: &mut [[__m512; N]; R],
    (rows, x): (&[Row<'_>; R], &[&[bf16]; N]),
    block: usize,
    table: __m512i,
) {
    // One block is eight words of codes.
    let (at, words) = (8 * block, rows[0].codes.len() / 4);
    let mask = if PAIR { 0xffff } else { 0x00ff };
    // SAFETY: by this function's contract the words of the mask are there, and the scales.
    unsafe {
        let mut word = [_mm512_setzero_si512(); R];
        for row in 0..R {
            let codes = rows[row].codes.as_ptr();
            prefetch_line(codes.wrapping_add(4 * at + PREFETCHED).addr());
            word[row] = _mm512_maskz_loadu_epi32(mask, codes.add(4 * at).cast());
        }
        let mut block_sums = [[_mm512_setzero_ps(); N]; R];
        for part in 0..4 {
            let mut value = [_mm512_setzero_si512(); R];
            for row in 0..R {
                value[row] = _mm512_permutexvar_epi16(word[row], table);
                word[row] = _mm512_srli_epi16::<4>(word[row]);
            }
            for vector in 0..N {
                let x = x[vector].as_ptr().add(2 * (part * words + at));
                let x = _mm512_maskz_loadu_epi32(mask, x.cast());
                for row in 0..R {
                    let sum = &mut block_sums[row][vector];
                    *sum = _mm512_dpbf16_ps(*sum, pairs(value[row]), pairs(x));
                }
            }
        }
        for row in 0..R {
            let scales = rows[row].scales.as_ptr().add(block);
            let mut scale = _mm512_set1_ps(*scales);
            if PAIR {
                scale = _mm512_mask_mov_ps(scale, 0xff00, _mm512_set1_ps(*scales.add(1)));
            }
            for vector in 0..N {
                let sum = &mut sums[row][vector];
                *sum = _mm512_fmadd_ps(block_sums[row][vector], scale, *sum);
            }
        }
    }
}

/// [`dots_avx512`] with vectors of eight, of one row: several are no faster.
///
/// # Safety
/// The processor has AVX2 and FMA; codes have 32 bytes, and vectors 64 values, for each scale.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn dots_avx2<const N: usize>(row: &Row<'_>, x: [&[f32]; N], out: &mut [f32; VECTORS]) {
    let words = row.codes.len() / 4;
    // SAFETY: by this function's contract: each step reads the eight words of a block, and their values.
    unsafe {
        let table = table_avx2();
        let mut sums = [_mm256_setzero_ps(); N];
        for (block, scale) in row.scales.iter().enumerate() {
            _mm_prefetch::<_MM_HINT_T0>(row.codes.as_ptr().wrapping_add(BYTES * block + PREFETCHED).cast());
            let mut word = _mm256_loadu_si256(row.codes.as_ptr().add(BYTES * block).cast());
            let mut block_sums = [_mm256_setzero_ps(); N];
            for part in 0..8 {
                let value = look_up_avx2(table, word);
                for vector in 0..N {
                    let x = _mm256_loadu_ps(x[vector].as_ptr().add(part * words + block * BLOCK / 8));
                    block_sums[vector] = _mm256_fmadd_ps(value, x, block_sums[vector]);
                }
                word = _mm256_srli_epi32::<4>(word);
            }
            for vector in 0..N {
                sums[vector] = _mm256_fmadd_ps(block_sums[vector], _mm256_set1_ps(*scale), sums[vector]);
            }
        }
        for (out, sums) in out.iter_mut().zip(sums) {
            let mut lanes = [0f32; 8];
            _mm256_storeu_ps(lanes.as_mut_ptr(), sums);
            *out = lanes.iter().sum();
        }
    }
}

/// Returns the lower and the upper half of the table.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn table_avx2() -> [__m256; 2] {
    // SAFETY: by this function's contract; the table has 16 values.
    unsafe { [_mm256_loadu_ps(TABLE.as_ptr()), _mm256_loadu_ps(TABLE.as_ptr().add(8))] }
}

/// Returns the values of the codes in the lowest four bits of each word.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn look_up_avx2(table: [__m256; 2], words: __m256i) -> __m256 {
    // SAFETY: by this function's contract.
    unsafe {
        // A permutation reads three bits; the fourth chooses the half.
        let half = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(words));
        let [lower, upper] = table.map(|half| _mm256_permutevar8x32_ps(half, words));
        _mm256_blendv_ps(lower, upper, half)
    }
}
