//! A part of a product of two matrices in bf16 into fp32, by AVX-512's instruction for pairs of bf16; on a processor with AMX by
//! [its tiles](super::amx).
//!
//! For `to [m, n] = a [m, k]·b [k, n]`:
//!
//! ```text
//! for each block of at most ROWS rows and DEPTH of k
//!     pack a [ROWS, DEPTH]
//!     for each tile of WIDE columns
//!         pack b [DEPTH, WIDE]
//!         for each slab of at most SLAB of k
//!             for each WIDE × NARROW elements of the block's output in this tile
//!                 multiply in registers, add
//! ```
//!
//! `vdpbf16ps` multiplies pairs along k, so a packed operand has the pair of one row or column in each 32-bit word, and the words of
//! WIDE rows (or columns) or of NARROW of them one after another. The wide panels belong to the operand along which the output is
//! dense. Packed operands take at most 4.3 MiB of the thread.
//!
//! Each element is summed in the order of k, in slabs that depend on k alone: the bits do not depend on the other sizes, on the
//! position or on the division into parts. The instruction treats subnormal numbers as zero, and rounds to nearest.
//!
//! Source: Intel's manual of instructions, `VDPBF16PS`; the loops are those of Goto and van de Geijn, "Anatomy of High-Performance
//! Matrix Multiplication" (2008).

use std::arch::x86_64::*;
use std::cell::RefCell;

use tch::Kind;

use super::{Matrix, STEP, Stored, piece};
use crate::processor;

/// Rows or columns of a wide panel: three vectors of fp32.
const WIDE: usize = 48;
/// Rows or columns of a narrow panel: with [`WIDE`], 24 of the 32 registers hold sums.
const NARROW: usize = 8;
const ROWS: usize = 1024;
const DEPTH: usize = 2048;
/// Length of k that is summed in registers: even, so that only the last slab has half a pair.
const SLAB: usize = 512;

/// Pairs from a load to the prefetch in the same line.
const AHEAD: usize = 2 * STEP;

thread_local! {
    /// The packed operands a and b.
    static PACKED: RefCell<[Vec<u32>; 2]> = const { RefCell::new([const { Vec::new() }; 2]) };
}

/// Whether [`multiply`] is for these matrices on this processor.
pub(super) fn applies(to: Matrix, a: Matrix, b: Matrix) -> bool {
    let dense = to.row_stride == 1 || to.column_stride == 1;
    let stored = [to.stored, a.stored, b.stored];
    dense
        && stored == [Stored::Float, Stored::Bfloat16, Stored::Bfloat16]
        && processor::multiplies_into_fp32(Kind::BFloat16)
}

/// Computes `to = a·b`, or `to += a·b`, on this thread: `[m, n]`, `[m, k]` and `[k, n]` for which [`applies`] is true.
///
/// # Safety
/// As [`multiply`](super::multiply).
pub(super) unsafe fn multiply(to: Matrix, a: Matrix, b: Matrix, [m, n, k]: [usize; 3], accumulate: bool) {
    if super::amx::is_there() {
        // SAFETY: by this function's contract.
        return unsafe { super::amx::multiply(to, a, b, [m, n, k], accumulate) };
    }
    // Lanes are along the dense dimension of the output.
    let lanes_are_rows = to.row_stride == 1;
    let (of_a, of_b) = if lanes_are_rows { (WIDE, NARROW) } else { (NARROW, WIDE) };
    let blocks = m.div_ceil(ROWS);
    PACKED.with_borrow_mut(|[packed_a, packed_b]| {
        for rows in (0..blocks).map(|block| piece(m, blocks, block)) {
            for depth in (0..k).step_by(DEPTH).map(|start| start..(start + DEPTH).min(k)) {
                let pairs = depth.len().div_ceil(2);
                // SAFETY: windows within the operands' sizes, by this function's contract; the packed operands are this thread's
                // own, and as long as `pack` says.
                unsafe {
                    pack(a.from(rows.start, depth.start), [rows.len(), depth.len()], of_a, packed_a);
                    for first in (0..n).step_by(WIDE) {
                        let columns = first..(first + WIDE).min(n);
                        let tile = b.from(depth.start, columns.start).transposed();
                        pack(tile, [columns.len(), depth.len()], of_b, packed_b);
                        for slab in (0..pairs).step_by(SLAB / 2) {
                            let slab = slab..(slab + SLAB / 2).min(pairs);
                            let add = accumulate || depth.start + slab.start > 0;
                            for row in (0..rows.len()).step_by(of_a) {
                                for column in (0..columns.len()).step_by(of_b) {
                                    let a = panel(packed_a, row, of_a, pairs, slab.start);
                                    let b = panel(packed_b, column, of_b, pairs, slab.start);
                                    let height = of_a.min(rows.len() - row);
                                    let width = of_b.min(columns.len() - column);
                                    let target = to.from(rows.start + row, columns.start + column);
                                    let (wide, narrow, lanes, lines, stride) = if lanes_are_rows {
                                        (a, b, height, width, target.column_stride)
                                    } else {
                                        (b, a, width, height, target.row_stride)
                                    };
                                    let sums = Sums { at: target.at as *mut f32, stride, lanes, lines, add };
                                    add_pairs(slab.len(), wide, narrow, sums);
                                }
                            }
                        }
                    }
                }
            }
        }
    });
}

/// The words of a panel of `width`, from a pair of k on.
fn panel(packed: &[u32], first: usize, width: usize, pairs: usize, pair: usize) -> *const u32 {
    packed[first * pairs + pair * width..].as_ptr()
}

/// Packs a matrix `[lines, depth]` into panels of `width` lines: `[lines/width, depth/2, width]` pairs, those beyond the matrix zero.
///
/// # Safety
/// The elements are bf16 in memory that lives; the processor has AVX-512 F.
#[target_feature(enable = "avx512f")]
unsafe fn pack(from: Matrix, [lines, depth]: [usize; 2], width: usize, packed: &mut Vec<u32>) {
    let pairs = depth.div_ceil(2);
    let words = lines.next_multiple_of(width) * pairs;
    if packed.len() < words {
        packed.resize(words, 0);
    }
    for (number, panel) in packed[..words].chunks_exact_mut(width * pairs).enumerate() {
        let first = number * width;
        let count = width.min(lines - first);
        if count < width || depth % 2 == 1 {
            panel.fill(0);
        }
        let source = from.from(first, 0);
        // SAFETY: by this function's contract; each function stays within [count, depth].
        unsafe {
            match (from.row_stride, from.column_stride) {
                (1, _) => interleave(source, [count, depth], width, panel),
                (_, 1) => transpose(source, [count, depth], width, panel),
                _ => gather(source, [count, depth], width, panel),
            }
        }
    }
}

/// Packs a panel whose lines are dense across: pairs from two rows of memory.
///
/// # Safety
/// As [`pack`].
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn interleave(from: Matrix, [count, depth]: [usize; 2], width: usize, panel: &mut [u32]) {
    for (pair, words) in panel.chunks_exact_mut(width).enumerate() {
        let first = from.from(0, 2 * pair).at as *const u16;
        let second = (2 * pair + 1 < depth).then(|| from.from(0, 2 * pair + 1).at as *const u16);
        let whole = if second.is_some() { count / STEP * STEP } else { 0 };
        // SAFETY: `count` elements lie at each of the two, and `count` of `width` words are written.
        unsafe {
            if let Some(second) = second {
                for at in (0..whole).step_by(STEP) {
                    let low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(first.add(at).cast()));
                    let high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(second.add(at).cast()));
                    let both = _mm512_or_si512(low, _mm512_slli_epi32::<16>(high));
                    _mm512_storeu_si512(words.as_mut_ptr().add(at).cast(), both);
                }
            }
            for (at, word) in words.iter_mut().enumerate().take(count).skip(whole) {
                let high = second.map_or(0, |second| second.add(at).read());
                *word = u32::from(first.add(at).read()) | u32::from(high) << 16;
            }
        }
    }
}

/// Packs a panel whose lines are dense along k: blocks of 16 lines and 16 pairs, transposed in registers.
///
/// # Safety
/// As [`pack`].
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn transpose(from: Matrix, [count, depth]: [usize; 2], width: usize, panel: &mut [u32]) {
    let whole = depth / 2;
    for start in (0..whole).step_by(STEP) {
        let pairs = STEP.min(whole - start);
        let mask = ((1u32 << pairs) - 1) as __mmask16;
        for first in (0..count).step_by(STEP) {
            // SAFETY: the lines have `pairs` pairs from `start` on, and the panel `width` words for each; a prefetch may have any
            // address.
            unsafe {
                let lines: [__m512i; STEP] = std::array::from_fn(|line| {
                    if first + line >= count {
                        return _mm512_setzero_si512();
                    }
                    let pairs = from.from(first + line, 2 * start).at as *const i32;
                    _mm_prefetch::<_MM_HINT_T0>(pairs.wrapping_add(AHEAD).cast());
                    _mm512_maskz_loadu_epi32(mask, pairs)
                });
                for (pair, words) in transposed(lines).into_iter().enumerate().take(pairs) {
                    let at = panel.as_mut_ptr().add((start + pair) * width + first);
                    if width == NARROW {
                        _mm256_storeu_si256(at.cast(), _mm512_castsi512_si256(words));
                    } else {
                        _mm512_storeu_si512(at.cast(), words);
                    }
                }
            }
        }
    }
    if depth % 2 == 1 {
        for line in 0..count {
            // SAFETY: the last element of this line.
            let last = unsafe { (from.from(line, depth - 1).at as *const u16).read() };
            panel[whole * width + line] = u32::from(last);
        }
    }
}

/// Transposes 16 × 16 words.
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

/// Packs a panel of any strides.
///
/// # Safety
/// As [`pack`].
pub(super) unsafe fn gather(from: Matrix, [count, depth]: [usize; 2], width: usize, panel: &mut [u32]) {
    for (pair, words) in panel.chunks_exact_mut(width).enumerate() {
        for (line, word) in words.iter_mut().enumerate().take(count) {
            // SAFETY: an element within `depth` of this line.
            let element = |at: usize| unsafe { (from.from(line, at).at as *const u16).read() };
            let second = if 2 * pair + 1 < depth { element(2 * pair + 1) } else { 0 };
            *word = u32::from(element(2 * pair)) | u32::from(second) << 16;
        }
    }
}

/// Where sums go: `lines` lines of `lanes` adjacent elements.
struct Sums {
    at: *mut f32,
    /// Elements from one line to the next.
    stride: isize,
    lanes: usize,
    lines: usize,
    /// Whether to add to what is there.
    add: bool,
}

/// Adds `pairs` products of pairs for [`WIDE`] lanes and [`NARROW`] lines.
///
/// # Safety
/// `wide` and `narrow` have `pairs` times so many words; the elements of `sums` live, and nothing else uses them meanwhile; the
/// processor has AVX-512 F and BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn add_pairs(pairs: usize, wide: *const u32, narrow: *const u32, sums: Sums) {
    const VECTORS: usize = WIDE / STEP;
    let mut total = [[_mm512_setzero_ps(); VECTORS]; NARROW];
    let line_of = |line: usize| sums.at.wrapping_offset(line as isize * sums.stride);
    // SAFETY: by this function's contract; both types are 512 bits without invalid values. A prefetch may have any address.
    unsafe {
        for line in 0..sums.lines {
            for vector in 0..VECTORS {
                _mm_prefetch::<_MM_HINT_T0>(line_of(line).wrapping_add(vector * STEP).cast());
            }
        }
        for pair in 0..pairs {
            let lanes: [__m512bh; VECTORS] = std::array::from_fn(|vector| {
                let words = _mm512_loadu_si512(wide.add(pair * WIDE + vector * STEP).cast());
                std::mem::transmute::<__m512i, __m512bh>(words)
            });
            for (line, total) in total.iter_mut().enumerate() {
                let word = _mm512_set1_epi32(narrow.add(pair * NARROW + line).read().cast_signed());
                let word = std::mem::transmute::<__m512i, __m512bh>(word);
                for (total, lanes) in total.iter_mut().zip(lanes) {
                    *total = _mm512_dpbf16_ps(*total, lanes, word);
                }
            }
        }
        for (line, total) in total.iter().enumerate().take(sums.lines) {
            for (vector, total) in total.iter().enumerate() {
                let lanes = sums.lanes.saturating_sub(vector * STEP).min(STEP);
                let mask = ((1u32 << lanes) - 1) as __mmask16;
                let at = line_of(line).wrapping_add(vector * STEP);
                let before = if sums.add { _mm512_maskz_loadu_ps(mask, at) } else { _mm512_setzero_ps() };
                _mm512_mask_storeu_ps(at, mask, _mm512_add_ps(before, *total));
            }
        }
    }
}
