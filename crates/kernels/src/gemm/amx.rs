//! A part of a product of two matrices in bf16 into fp32, by AMX's tiles of bf16.
//!
//! For `to [m, n] = a [m, k]·b [k, n]`, with dense rows of `to` (else the product of the transposed operands is computed):
//!
//! ```text
//! for each block of at most ROWS rows and DEPTH of k
//!     pack a [ROWS, DEPTH]
//!     for each SIDE columns
//!         pack b [DEPTH, SIDE]
//!         for each slab of at most SLAB of k, whose packed b stays in the L1 cache
//!             for each SIDE × SIDE elements of the output
//!                 load them, multiply in tiles, store
//! ```
//!
//! A tile is 16 rows of 16 words of 32 bits; `tdpbf16ps` adds to a tile of fp32 the product of two tiles of pairs along k: those of a have a
//! row of a in each row, those of b a pair of rows of b. Packed operands are such tiles one after another, padded with zeros, 1.1 MiB of the
//! thread.
//!
//! Each element is summed 32 elements of k at a time, from what the output held on: the bits depend on neither the other sizes, the position,
//! the blocks nor the division into parts. The instruction treats subnormal numbers as zero, and rounds to nearest.
//!
//! Source: Intel's manual of instructions, `TDPBF16PS`, and its optimization manual, chapter "Intel Advanced Matrix Extensions".

use std::arch::asm;
use std::arch::x86_64::{__m512i, _mm512_loadu_si512, _mm512_storeu_si512};
use std::cell::RefCell;

use super::words::{Pair, Words, pack_panel, transposed};
use super::{Matrix, piece};
use crate::amx::{TILE, Tiles};
use crate::simd;

const WORDS: usize = TILE * TILE;
/// Rows and columns of the output in registers: two tiles each way.
const SIDE: usize = 2 * TILE;
const ROWS: usize = 512;
const DEPTH: usize = 1024;
/// A multiple of the 32 elements of k in a tile.
const SLAB: usize = 512;

thread_local! {
    /// The packed operands a and b.
    static PACKED: RefCell<[Words; 2]> = const { RefCell::new([const { Words::new() }; 2]) };
}

/// Computes `to = a·b`, or `to += a·b`, on this thread: `[m, n]`, `[m, k]` and `[k, n]`; a and b in bf16, `to` in fp32 and dense one way.
///
/// # Safety
/// As [`multiply`](super::multiply); [`is_there`](crate::amx::is_there) is true, and the processor has AVX-512 F, BW and VL.
pub(super) unsafe fn multiply(to: Matrix, a: Matrix, b: Matrix, [m, n, k]: [usize; 3], accumulate: bool) {
    let (to, a, b, m, n) = if to.column_stride == 1 {
        (to, a, b, m, n)
    } else {
        (to.transposed(), b.transposed(), a.transposed(), n, m)
    };
    let blocks = m.div_ceil(ROWS);
    // SAFETY: by this function's contract.
    let _tiles = unsafe { Tiles::configure() };
    PACKED.with_borrow_mut(|[packed_a, packed_b]| {
        for rows in (0..blocks).map(|block| piece(m, blocks, block)) {
            for depth in (0..k).step_by(DEPTH).map(|start| start..(start + DEPTH).min(k)) {
                let steps = depth.len().div_ceil(SIDE);
                // SAFETY: windows within the operands' sizes, by this function's contract; the packed operands are this thread's
                // own, and as long as `pack` says.
                unsafe {
                    let size = [rows.len(), depth.len()];
                    let packed_a = pack(a.from(rows.start, depth.start), size, Side::Left, packed_a);
                    for first in (0..n).step_by(SIDE) {
                        let columns = first..(first + SIDE).min(n);
                        let lines = b.from(depth.start, columns.start).transposed();
                        let packed_b = pack(lines, [columns.len(), depth.len()], Side::Right, packed_b);
                        for slab in (0..steps).step_by(SLAB / SIDE) {
                            let length = (SLAB / SIDE).min(steps - slab);
                            let add = accumulate || depth.start + slab > 0;
                            for row in (0..rows.len()).step_by(SIDE) {
                                let height = SIDE.min(rows.len() - row);
                                let tiles = |packed: *const u32, line: usize| {
                                    [0, TILE]
                                        .map(|tile| packed.add(((line + tile) * steps + slab * TILE) * TILE))
                                };
                                let target = to.from(rows.start + row, columns.start);
                                // The processor does not foresee rows that lie in pages of their own.
                                for next in SIDE..(2 * SIDE).min(rows.len() - row) {
                                    simd::prefetch(target.from(next, 0).at, columns.len() * size_of::<f32>());
                                }
                                let sums =
                                    Sums { at: target.at as *mut f32, stride: to.row_stride as usize, add };
                                let operands = [tiles(packed_a, row), tiles(packed_b, 0)];
                                sums.add_products(length, operands, [height, columns.len()]);
                            }
                        }
                    }
                }
            }
        }
    });
}

/// Which operand is packed: lines of the left one are rows of tiles, those of the right one columns.
#[derive(Clone, Copy, PartialEq)]
enum Side {
    Left,
    Right,
}

/// Packs a matrix `[lines, depth]` into tiles: `[lines/16, depth/32]` of them, lines in pairs of tiles, zeros beyond the matrix.
///
/// # Safety
/// The elements are bf16 in memory that lives; the processor has AVX-512 F, BW and VL.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn pack(from: Matrix, [lines, depth]: [usize; 2], side: Side, packed: &mut Words) -> *const u32 {
    let line_words = depth.div_ceil(SIDE) * TILE;
    let packed = packed.words(lines.next_multiple_of(SIDE) * line_words);
    for (number, tiles) in packed.chunks_exact_mut(TILE * line_words).enumerate() {
        let first = number * TILE;
        let count = TILE.min(lines.saturating_sub(first));
        if count < TILE || !depth.is_multiple_of(SIDE) {
            tiles.fill(0);
        }
        let source = from.from(first, 0);
        let pairs = &mut tiles[..depth.div_ceil(2) * TILE];
        // SAFETY: by this function's contract; each stays within [count, depth].
        unsafe {
            if side == Side::Left && from.column_stride == 1 {
                copy(source, [count, depth], tiles);
            } else {
                pack_panel::<Pair>(source, [count, depth], TILE, pairs);
            }
        }
        if side == Side::Left && from.column_stride != 1 {
            for tile in tiles.chunks_exact_mut(WORDS) {
                // SAFETY: a tile has 16 rows of 64 bytes.
                unsafe {
                    let rows: [__m512i; TILE] =
                        std::array::from_fn(|row| _mm512_loadu_si512(tile.as_ptr().add(row * TILE).cast()));
                    for (row, words) in transposed(rows).into_iter().enumerate() {
                        _mm512_storeu_si512(tile.as_mut_ptr().add(row * TILE).cast(), words);
                    }
                }
            }
        }
    }
    packed.as_ptr()
}

/// Copies lines that are dense along k into rows of tiles.
///
/// # Safety
/// As [`pack`].
unsafe fn copy(from: Matrix, [count, depth]: [usize; 2], tiles: &mut [u32]) {
    for (step, tile) in tiles.chunks_exact_mut(WORDS).enumerate() {
        let length = SIDE.min(depth - step * SIDE);
        for (line, row) in tile.chunks_exact_mut(TILE).enumerate().take(count) {
            // SAFETY: that many elements of 16 bits lie at both.
            unsafe {
                let source = from.from(line, step * SIDE).at as *const u16;
                std::ptr::copy_nonoverlapping(source, row.as_mut_ptr().cast(), length);
            }
        }
    }
}

/// Sums in memory: rows of [`SIDE`] elements, as many rows.
struct Sums {
    at: *mut f32,
    /// Elements from one row to the next.
    stride: usize,
    /// Whether to add to the output.
    add: bool,
}

impl Sums {
    /// Computes the first `size` rows and columns, from `steps` tiles of each half of a and b.
    ///
    /// # Safety
    /// The tiles live; so do these elements, which nothing else uses meanwhile; the tiles are configured.
    unsafe fn add_products(self, steps: usize, operands: [[*const u32; 2]; 2], [rows, columns]: [usize; 2]) {
        if [rows, columns] == [SIDE, SIDE] {
            // SAFETY: by this function's contract.
            return unsafe { self.add_whole(steps, operands) };
        }
        let mut padded = [0.0f32; SIDE * SIDE];
        // SAFETY: rows of that many elements lie at both, by this function's contract.
        unsafe {
            if self.add {
                for (row, to) in padded.chunks_exact_mut(SIDE).enumerate().take(rows) {
                    std::ptr::copy_nonoverlapping(self.at.add(row * self.stride), to.as_mut_ptr(), columns);
                }
            }
            Self { at: padded.as_mut_ptr(), stride: SIDE, add: self.add }.add_whole(steps, operands);
            for (row, from) in padded.chunks_exact(SIDE).enumerate().take(rows) {
                std::ptr::copy_nonoverlapping(from.as_ptr(), self.at.add(row * self.stride), columns);
            }
        }
    }

    /// # Safety
    /// As [`Sums::add_products`], of all rows and columns.
    unsafe fn add_whole(self, steps: usize, [a, b]: [[*const u32; 2]; 2]) {
        let lower = self.at.wrapping_add(TILE * self.stride);
        // SAFETY: by this function's contract; the instructions read the tiles of a and b and these elements, and write these elements and
        // the registers that are named.
        unsafe {
            asm!(
                "test {add}, {add}",
                "jz 2f",
                "tileloadd tmm0, [{upper} + {stride}*1]",
                "tileloadd tmm1, [{upper} + {stride}*1 + 64]",
                "tileloadd tmm2, [{lower} + {stride}*1]",
                "tileloadd tmm3, [{lower} + {stride}*1 + 64]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "3:",
                "tileloadd tmm4, [{a0} + {row}*1]",
                "tileloadd tmm6, [{b0} + {row}*1]",
                "tileloadd tmm7, [{b1} + {row}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a1} + {row}*1]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a0}, {tile}",
                "add {a1}, {tile}",
                "add {b0}, {tile}",
                "add {b1}, {tile}",
                "dec {steps}",
                "jnz 3b",
                "tilestored [{upper} + {stride}*1], tmm0",
                "tilestored [{upper} + {stride}*1 + 64], tmm1",
                "tilestored [{lower} + {stride}*1], tmm2",
                "tilestored [{lower} + {stride}*1 + 64], tmm3",
                add = in(reg) usize::from(self.add),
                upper = in(reg) self.at,
                lower = in(reg) lower,
                stride = in(reg) self.stride * size_of::<f32>(),
                row = in(reg) TILE * size_of::<u32>(),
                tile = const WORDS * size_of::<u32>(),
                a0 = inout(reg) a[0] => _,
                a1 = inout(reg) a[1] => _,
                b0 = inout(reg) b[0] => _,
                b1 = inout(reg) b[1] => _,
                steps = inout(reg) steps => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}
