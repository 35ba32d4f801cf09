//! Products of up to 16 vectors with a weight, both in bf16, by AMX tiles.
//!
//! ```text
//! for each 32 rows of the weight
//!     for each 32 columns
//!         load two tiles of 16 rows from the weight as it is stored, and a tile of pairs of all vectors; multiply, add
//! ```
//!
//! Meanwhile the next 32 rows are prefetched in the order of memory, because a tile reads 16 rows at a time, an order that the hardware
//! prefetcher does not follow. An element of the result is summed 32 columns at a time, so its bits do not depend on the other vectors and
//! rows. The instruction treats subnormal numbers as zero.
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, `TDPBF16PS`.

use std::arch::asm;

use runtime::Result;
use runtime::parallel;

use super::Results;
use crate::amx::{TILE, Tiles};
use crate::gemm::words::Words;
use crate::operands::Rows;

/// 32-bit words of a tile.
pub(crate) const WORDS: usize = TILE * TILE;
/// Rows of the weight that are multiplied together.
pub(crate) const GROUP: usize = 2 * TILE;
/// Maximum number of vectors.
pub(crate) const VECTORS: usize = TILE;

/// Sums of a group of rows with all vectors.
pub(crate) type Sums = [[f32; VECTORS]; GROUP];

/// Returns whether [`run`] supports that many vectors and rows.
pub(super) fn applies(vectors: usize, rows: usize) -> bool {
    vectors <= VECTORS && rows >= GROUP
}

/// Computes the results of all rows, which are at least [`GROUP`]. `multiply(start, end)` returns the sums of the [`GROUP`] rows from `start`
/// on; it runs with tiles configured, and rows from `end` on belong to another thread. The processor must have AMX.
pub(crate) fn for_groups(results: &Results, multiply: impl Fn(usize, usize) -> Sums + Sync) -> Result<()> {
    let [vectors, rows] = results.size();
    let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1).max(1);
    // A task for each thread: the next rows are prefetched into the cache of the processor that multiplies them.
    let rows_per_task = rows.div_ceil(threads).next_multiple_of(GROUP);
    parallel::for_each(rows.div_ceil(rows_per_task), |task| {
        let task_rows = task * rows_per_task..rows.min((task + 1) * rows_per_task);
        // SAFETY: `amx::is_there`: the callers run only if `processor` chose `Bf16Instructions::Tiles`, which it does under that condition.
        let _tiles = unsafe { Tiles::configure() };
        let mut sums = vec![0f32; vectors * task_rows.len()];
        for first in task_rows.clone().step_by(GROUP) {
            // A short last group is read with rows before it.
            let start = first.min(rows - GROUP);
            let group_sums = multiply(start, task_rows.end);
            for row in first..task_rows.end.min(first + GROUP) {
                for vector in 0..vectors {
                    sums[vector * task_rows.len() + row - task_rows.start] = group_sums[row - start][vector];
                }
            }
        }
        for (vector, sums) in sums.chunks_exact(task_rows.len()).enumerate() {
            // SAFETY: the vector and the rows are within the results, and no other task writes these rows.
            unsafe { results.put(vector, task_rows.start, sums) };
        }
    })
}

/// Computes the products of all rows of a bf16 weight with the vectors `x`. Rows and vectors have `words` pairs of elements.
pub(super) fn run(weight: Rows, words: usize, x: &[&[u32]], results: &Results) -> Result<()> {
    // The vectors in tiles: a row of a tile has one pair of each vector.
    let mut packed = Words::new();
    let packed = packed.words(words.div_ceil(TILE) * WORDS);
    packed.fill(0);
    for (vector, x) in x.iter().enumerate() {
        for (pair, word) in x.iter().enumerate() {
            packed[pair * TILE + vector] = *word;
        }
    }
    let x = Vectors { tiles: packed, words };
    for_groups(results, |start, end| {
        // SAFETY: the rows are in the CPU tensor of the weight, which outlives the call; the tiles are configured.
        unsafe { x.multiply(weight, start, end) }
    })
}

/// Vectors in tiles of pairs: `[words/16, 16 words, 16 vectors]`, zeros beyond them.
struct Vectors<'a> {
    tiles: &'a [u32],
    words: usize,
}

impl Vectors<'_> {
    /// Multiplies [`GROUP`] rows of the weight, and prefetches as many behind them unless they are the last ones before `end`.
    ///
    /// # Safety
    /// The rows live, and are as long as the vectors; the tiles are configured.
    unsafe fn multiply(&self, weight: Rows, first: usize, end: usize) -> Sums {
        let stride = weight.row_stride * size_of::<u16>();
        let upper = (weight.pointer + first * stride) as *const u8;
        let lower = upper.wrapping_add(TILE * stride);
        let ahead = if first + GROUP < end { lower.wrapping_add(TILE * stride) } else { upper };
        let (full, rest) = (self.words / TILE, self.words % TILE);
        // The last columns are copied and padded: the memory behind a row may not be numbers.
        let mut last = [[0u32; TILE]; GROUP];
        if rest > 0 {
            for (row, last) in last.iter_mut().enumerate() {
                let from = upper.wrapping_add(row * stride).wrapping_add(full * TILE * size_of::<u32>());
                // SAFETY: that many words are left of the row.
                unsafe {
                    std::ptr::copy_nonoverlapping(from, last.as_mut_ptr().cast(), rest * size_of::<u32>())
                };
            }
        }
        let last: *const [u32; TILE] = if rest > 0 { last.as_ptr() } else { std::ptr::null() };
        let mut sums = [[0f32; VECTORS]; GROUP];
        // SAFETY: by this function's contract; the instructions read whole tiles of the weight's rows and of the vectors, and the last
        // columns, and write the sums and the registers that are named. A prefetch may have any address.
        unsafe {
            asm!(
                // The sums of the upper and the lower 16 rows: tmm0 and tmm1.
                "tilezero tmm0",
                "tilezero tmm1",
                "test {steps}, {steps}",
                "jz 4f",
                // For each 16 words of the rows: prefetch 32 lines, 2 KiB, of the next rows.
                "2:",
                "mov {lines:e}, 8",
                "3:",
                "prefetcht1 [{ahead}]",
                "prefetcht1 [{ahead} + 64]",
                "prefetcht1 [{ahead} + 128]",
                "prefetcht1 [{ahead} + 192]",
                "add {ahead}, 256",
                "dec {lines:e}",
                "jnz 3b",
                // Multiply both tiles of the weight by one tile of the vectors.
                "tileloadd tmm4, [{x} + {row}*1]",
                "tileloadd tmm2, [{upper} + {stride}*1]",
                "tdpbf16ps tmm0, tmm2, tmm4",
                "tileloadd tmm3, [{lower} + {stride}*1]",
                "tdpbf16ps tmm1, tmm3, tmm4",
                // Go on by a tile of the vectors and 64 bytes of the rows.
                "add {x}, 1024",
                "add {upper}, 64",
                "add {lower}, 64",
                "dec {steps}",
                "jnz 2b",
                // The last columns, from their padded copy, unless the rows are whole tiles.
                "4:",
                "test {last}, {last}",
                "jz 5f",
                "tileloadd tmm4, [{x} + {row}*1]",
                "tileloadd tmm2, [{last} + {row}*1]",
                "tdpbf16ps tmm0, tmm2, tmm4",
                "tileloadd tmm3, [{last} + {row}*1 + 1024]",
                "tdpbf16ps tmm1, tmm3, tmm4",
                // Write the sums.
                "5:",
                "tilestored [{sums} + {row}*1], tmm0",
                "tilestored [{sums} + {row}*1 + 1024], tmm1",
                steps = inout(reg) full => _,
                lines = out(reg) _,
                ahead = inout(reg) ahead => _,
                x = inout(reg) self.tiles.as_ptr() => _,
                upper = inout(reg) upper => _,
                lower = inout(reg) lower => _,
                stride = in(reg) stride,
                row = in(reg) TILE * size_of::<u32>(),
                last = in(reg) last,
                sums = in(reg) sums.as_mut_ptr(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                options(nostack),
            );
        }
        sums
    }
}
