//! Packs the operands of a matrix product into panels of 32-bit words, the layout that the AVX-512 and AMX kernels read.
//!
//! A word holds one element in fp32, cast from its dtype, or two bf16 elements that are neighbours along k ([`Word`]). An operand is
//! `[lines, depth]`: its lines are rows of a or columns of b, and its depth is k. A panel has `width` lines and the layout
//! `[words of k, width]`: for each word of k, the words of all lines. Words beyond the matrix are zero.

use std::arch::x86_64::*;

use half::f16;

use super::{Matrix, STEP};
use crate::simd::{prefetch, prefetch_line};

/// Distance of the prefetch from the load, in bytes along a line.
const AHEAD: usize = 128;
/// Distance of the prefetch from the load, in words of k, if each k is a row of memory. The rows of a wide matrix lie in different pages,
/// and the hardware prefetcher does not cross pages.
const ROWS_AHEAD: usize = 8;

/// The contents of a 32-bit word.
pub(super) trait Word {
    type Element: Copy;
    /// Elements of k in a word.
    const ELEMENTS: usize;

    /// Loads 16 words of one line, which follow each other along k. Words without a bit in `mask` are zero.
    ///
    /// # Safety
    /// `at` points to the elements of the words in `mask`; the processor has AVX-512 F, BW and VL.
    unsafe fn along(at: *const Self::Element, mask: __mmask16) -> __m512i;

    /// Loads one word of each of 16 lines. `rows` has a row of memory for each element of a word; elements without a bit in their row's
    /// mask are zero.
    ///
    /// # Safety
    /// As [`Word::along`], for each row.
    unsafe fn across(rows: [*const Self::Element; 2], masks: [__mmask16; 2]) -> __m512i;

    /// Packs one or two elements into a word; a missing second element is zero.
    fn word(first: Self::Element, second: Option<Self::Element>) -> u32;
}

/// Two elements in bf16, the first in the lower half.
pub(super) struct Pair;

impl Word for Pair {
    type Element = u16;
    const ELEMENTS: usize = 2;

    /// # Safety
    /// As in the trait.
    #[inline(always)]
    unsafe fn along(at: *const u16, mask: __mmask16) -> __m512i {
        // SAFETY: by this function's contract.
        unsafe { _mm512_maskz_loadu_epi32(mask, at.cast()) }
    }

    /// # Safety
    /// As in the trait.
    #[inline(always)]
    unsafe fn across(rows: [*const u16; 2], masks: [__mmask16; 2]) -> __m512i {
        // SAFETY: by this function's contract.
        unsafe {
            let low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(masks[0], rows[0].cast()));
            let high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(masks[1], rows[1].cast()));
            _mm512_or_si512(low, _mm512_slli_epi32::<16>(high))
        }
    }

    #[inline(always)]
    fn word(first: u16, second: Option<u16>) -> u32 {
        u32::from(first) | u32::from(second.unwrap_or(0)) << 16
    }
}

/// An element in fp32, from one in `T`.
pub(super) struct Cast<T>(std::marker::PhantomData<T>);

macro_rules! cast {
    ($stored:ty, $element:ty, |$at:ident, $mask:ident| $load:expr, |$one:ident| $word:expr) => {
        impl Word for Cast<$stored> {
            type Element = $element;
            const ELEMENTS: usize = 1;

            /// # Safety
            /// As in the trait.
            #[inline(always)]
            unsafe fn along($at: *const $element, $mask: __mmask16) -> __m512i {
                // SAFETY: by this function's contract.
                unsafe { $load }
            }

            /// # Safety
            /// As in the trait.
            #[inline(always)]
            unsafe fn across(rows: [*const $element; 2], masks: [__mmask16; 2]) -> __m512i {
                // SAFETY: by this function's contract.
                unsafe { Self::along(rows[0], masks[0]) }
            }

            #[inline(always)]
            fn word($one: $element, _second: Option<$element>) -> u32 {
                $word
            }
        }
    };
}

cast!(f32, u32, |at, mask| _mm512_maskz_loadu_epi32(mask, at.cast()), |one| one);
cast!(
    half::bf16,
    u16,
    |at, mask| _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at.cast()))),
    |one| u32::from(one) << 16
);
cast!(
    f16,
    u16,
    |at, mask| _mm512_castps_si512(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, at.cast()))),
    |one| f16::from_bits(one).to_f32().to_bits()
);

/// A buffer for packed words, which grows as needed and is reused. It is aligned to cache lines, so that no vector crosses two of them.
pub(crate) struct Words(Vec<Line>);

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u32; STEP]);

impl Words {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    /// Returns `count` words; their values are unspecified.
    pub(crate) fn words(&mut self, count: usize) -> &mut [u32] {
        let lines = count.div_ceil(STEP);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0; STEP]));
        }
        // SAFETY: a line is sixteen words without padding, and `self.0` has at least `count` words.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), count) }
    }
}

/// Packs a matrix `[lines, depth]` into panels of `width` lines, 8 or a multiple of 16; `packed` has the words of that many panels.
///
/// # Safety
/// `from` is a matrix of `W::Element` in live memory; the processor has AVX-512 F, BW and VL.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack<W: Word>(
    from: Matrix,
    [lines, depth]: [usize; 2],
    width: usize,
    packed: &mut [u32],
) {
    for (number, panel) in packed.chunks_exact_mut(width * depth.div_ceil(W::ELEMENTS)).enumerate() {
        let first = number * width;
        let count = width.min(lines - first);
        if count < width {
            panel.fill(0);
        }
        // SAFETY: by this function's contract.
        unsafe { pack_panel::<W>(from.from(first, 0), [count, depth], width, panel) };
    }
}

/// Packs the first `count` lines of a panel. The words of its other lines are unspecified afterwards: zero or unchanged.
///
/// # Safety
/// As [`pack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack_panel<W: Word>(from: Matrix, size: [usize; 2], width: usize, panel: &mut [u32]) {
    // SAFETY: by this function's contract; each stays within `size`.
    unsafe {
        match (from.row_stride, from.column_stride) {
            (1, _) => interleave::<W>(from, size, width, panel),
            (_, 1) => transpose::<W>(from, size, width, panel),
            _ => gather::<W>(from, size, width, panel),
        }
    }
}

/// Returns the mask of the first `count` of 16 words.
pub(super) fn mask(count: usize) -> __mmask16 {
    ((1u32 << count.min(STEP)) - 1) as __mmask16
}

/// Packs a panel of a matrix with row stride 1, whose lines are neighbours in memory.
///
/// # Safety
/// As [`pack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn interleave<W: Word>(from: Matrix, [count, depth]: [usize; 2], width: usize, panel: &mut [u32]) {
    for (number, words) in panel.chunks_exact_mut(width).enumerate() {
        let k = number * W::ELEMENTS;
        let rows = [k, k + 1].map(|k| from.from(0, k).at as *const W::Element);
        for next in 0..W::ELEMENTS {
            prefetch(from.from(0, k + ROWS_AHEAD * W::ELEMENTS + next).at, count * size_of::<W::Element>());
        }
        for at in (0..count).step_by(STEP) {
            let first = mask(count - at);
            let second = if k + 1 < depth { first } else { 0 };
            // SAFETY: `count` elements lie at each row within the depth, and `count` of `width` words are written.
            unsafe {
                let both = W::across(rows.map(|row| row.wrapping_add(at)), [first, second]);
                _mm512_mask_storeu_epi32(words.as_mut_ptr().add(at).cast(), first, both);
            }
        }
    }
}

/// Packs a panel of a matrix with column stride 1, whose lines are contiguous: transposes blocks of 16 lines and 16 words in registers.
///
/// # Safety
/// As [`pack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn transpose<W: Word>(from: Matrix, [count, depth]: [usize; 2], width: usize, panel: &mut [u32]) {
    let full = depth / W::ELEMENTS;
    for start in (0..full).step_by(STEP) {
        let length = STEP.min(full - start);
        for first in (0..count).step_by(STEP) {
            // SAFETY: the lines have that many words from `start` on, and the panel `width` words for each; a prefetch may have any
            // address.
            unsafe {
                let lines: [__m512i; STEP] = std::array::from_fn(|line| {
                    if first + line >= count {
                        return _mm512_setzero_si512();
                    }
                    let at = from.from(first + line, start * W::ELEMENTS).at as *const W::Element;
                    prefetch_line(at.addr() + AHEAD);
                    W::along(at, mask(length))
                });
                for (word, words) in transposed(lines).into_iter().enumerate().take(length) {
                    let at = panel.as_mut_ptr().add((start + word) * width + first);
                    _mm512_mask_storeu_epi32(at.cast(), mask(width - first), words);
                }
            }
        }
    }
    if full * W::ELEMENTS < depth {
        for line in 0..count {
            // SAFETY: the last element of this line.
            let last = unsafe { (from.from(line, depth - 1).at as *const W::Element).read() };
            panel[full * width + line] = W::word(last, None);
        }
    }
}

/// Transposes 16 × 16 words in four steps. After them a register has words of 2, 4, 8 and 16 lines.
#[target_feature(enable = "avx512f")]
pub(super) fn transposed(lines: [__m512i; STEP]) -> [__m512i; STEP] {
    let by_two: [__m512i; STEP] = std::array::from_fn(|at| {
        let (a, b) = (lines[at / 2 * 2], lines[at / 2 * 2 + 1]);
        if at % 2 == 0 { _mm512_unpacklo_epi32(a, b) } else { _mm512_unpackhi_epi32(a, b) }
    });
    // Four words of a group of four lines, from each quarter of the registers.
    let by_four: [__m512i; STEP] = std::array::from_fn(|at| {
        let (a, b) = (by_two[at / 4 * 4 + at % 4 / 2], by_two[at / 4 * 4 + at % 4 / 2 + 2]);
        if at % 2 == 0 { _mm512_unpacklo_epi64(a, b) } else { _mm512_unpackhi_epi64(a, b) }
    });
    let by_eight: [__m512i; STEP] = std::array::from_fn(|at| {
        let (word, group, upper) = (at % 4, at / 8 * 8, at % 8 / 4);
        let (a, b) = (by_four[group + word], by_four[group + word + 4]);
        if upper == 0 { _mm512_shuffle_i32x4::<0x88>(a, b) } else { _mm512_shuffle_i32x4::<0xdd>(a, b) }
    });
    std::array::from_fn(|at| {
        // Quarters 0 and 2 are in the first four of `by_eight`, quarters 1 and 3 in the others.
        let (word, quarter) = (at % 4, at / 4);
        let (a, b) = (by_eight[word + quarter % 2 * 4], by_eight[8 + word + quarter % 2 * 4]);
        if quarter < 2 { _mm512_shuffle_i32x4::<0x88>(a, b) } else { _mm512_shuffle_i32x4::<0xdd>(a, b) }
    })
}

/// Packs a panel of a matrix with any strides, element by element.
///
/// # Safety
/// As [`pack`].
unsafe fn gather<W: Word>(from: Matrix, [count, depth]: [usize; 2], width: usize, panel: &mut [u32]) {
    for (number, words) in panel.chunks_exact_mut(width).enumerate() {
        let k = number * W::ELEMENTS;
        for (line, word) in words.iter_mut().enumerate().take(count) {
            // SAFETY: an element within `depth` of this line.
            let element = |k: usize| unsafe { (from.from(line, k).at as *const W::Element).read() };
            let second = (W::ELEMENTS > 1 && k + 1 < depth).then(|| element(k + 1));
            *word = W::word(element(k), second);
        }
    }
}
