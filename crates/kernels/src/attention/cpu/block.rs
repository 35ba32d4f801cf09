//! Blocks of rows, and the visible part of a pair of blocks.

use std::ops::Range;

use runtime::Result;
use tch::{Kind, Tensor};

use crate::operands::{Access, Operands};
use crate::simd::{Element, Real};

/// Queries, or keys, of a block: lanes of the vectors that the scores are.
pub(super) const BLOCK: usize = 64;
/// Keys of a block on the diagonal that are taken at a time, with the lanes of the queries that see one of them.
const STEP: usize = 16;
/// Elements of the widest vector: rows in scratch memory are padded to a multiple.
pub(super) const LANES: usize = 16;

/// Rows and columns that are transposed at a time: written along one side at once, they would each take a line of the cache.
const TILE: usize = 16;

/// The heads of a tensor `[batch, heads, tokens, head]`: its address, and the strides of all but the last dimension, which is dense.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub(super) at: usize,
    pub(super) strides: [usize; 3],
}

impl Heads {
    /// Adds a tensor of this size to the operands of a pass: `[batch, heads, tokens, head]`, or `[batch, tokens, heads·head]` with heads of
    /// width `joint`.
    pub(super) fn new(
        operands: &mut Operands,
        access: Access,
        name: &'static str,
        tensor: &Tensor,
        kind: Kind,
        size: &[i64],
        joint: Option<i64>,
    ) -> Result<Self> {
        let layout = operands.heads(access, name, tensor, kind, size)?;
        let stride = |dimension: usize| layout.stride()[dimension] as usize;
        let strides = match joint {
            None => [stride(0), stride(1), stride(2)],
            Some(head) => [stride(0), head as usize, stride(1)],
        };
        Ok(Self { at: layout.range()?.start, strides })
    }

    /// Returns the first element of a row.
    pub(super) fn row<X>(self, batch: usize, head: usize, token: usize) -> *mut X {
        let [batch_stride, head_stride, token_stride] = self.strides;
        (self.at as *mut X).wrapping_add(batch * batch_stride + head * head_stride + token * token_stride)
    }

    /// The same tensor from a token of each row on.
    pub(super) fn starting_at<X>(self, token: usize) -> Self {
        Self { at: self.row::<X>(0, 0, token) as usize, ..self }
    }

    pub(super) fn row_stride(self) -> usize {
        self.strides[2]
    }
}

/// Rows in the compute type: in place, or a copy.
#[derive(Clone, Copy)]
pub(super) struct Rows<R> {
    pub(super) at: *const R,
    pub(super) stride: usize,
}

/// Returns whether rows of this width are used in place.
pub(super) fn in_place<X: Element>(head: usize) -> bool {
    X::as_compute(&[]).is_some() && head.is_multiple_of(LANES)
}

/// Returns `count` rows from `from` on; `scratch` has room for them, padded.
///
/// # Safety
/// The rows lie in memory that lives as long as they are used.
#[inline(always)]
pub(super) unsafe fn rows<X: Element>(
    from: *const X,
    stride: usize,
    [count, head]: [usize; 2],
    scratch: &mut [X::Compute],
) -> Rows<X::Compute> {
    if in_place::<X>(head) {
        return Rows { at: from.cast(), stride };
    }
    let padded = head.next_multiple_of(LANES);
    for (row, to) in scratch.chunks_exact_mut(padded).enumerate().take(count) {
        // SAFETY: by this function's contract.
        let from = unsafe { std::slice::from_raw_parts(from.add(row * stride), head) };
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.widen();
        }
        to[head..].fill(X::Compute::ZERO);
    }
    Rows { at: scratch.as_ptr(), stride: padded }
}

/// Writes rows transposed, times `factor`: `to [head, BLOCK]`, zeros beyond the rows.
///
/// # Safety
/// As [`rows`].
#[inline(always)]
pub(super) unsafe fn transposed<X: Element>(
    from: *const X,
    stride: usize,
    [count, head]: [usize; 2],
    factor: X::Compute,
    to: &mut [X::Compute],
) {
    let to = &mut to[..head * BLOCK];
    if count < BLOCK {
        to.fill(X::Compute::ZERO);
    }
    let mut tile = [[X::Compute::ZERO; TILE]; TILE];
    for (token, column) in tiles(count, head) {
        let tokens = TILE.min(count - token);
        let columns = TILE.min(head - column);
        for (row, tile) in tile.iter_mut().enumerate().take(tokens) {
            let from = from.wrapping_add((token + row) * stride + column);
            // SAFETY: by this function's contract.
            let from = unsafe { std::slice::from_raw_parts(from, columns) };
            for (tile, from) in tile.iter_mut().zip(from) {
                *tile = from.widen() * factor;
            }
        }
        for (index, to) in to.chunks_exact_mut(BLOCK).skip(column).enumerate().take(columns) {
            for (to, tile) in to[token..].iter_mut().zip(&tile[..tokens]) {
                *to = tile[index];
            }
        }
    }
}

/// Writes columns of `from [head, BLOCK]`, each times its factor, as rows.
///
/// # Safety
/// The rows lie in memory that lives, and nothing else uses them meanwhile.
#[inline(always)]
pub(super) unsafe fn untransposed<X: Element>(
    from: &[X::Compute],
    factors: &[X::Compute; BLOCK],
    [count, head]: [usize; 2],
    to: *mut X,
    stride: usize,
) {
    let mut tile = [[X::Compute::ZERO; TILE]; TILE];
    for (token, column) in tiles(count, head) {
        let tokens = TILE.min(count - token);
        let columns = TILE.min(head - column);
        for (from, tile) in from.chunks_exact(BLOCK).skip(column).zip(&mut tile[..columns]) {
            tile.copy_from_slice(&from[token..token + TILE]);
        }
        for (row, factor) in factors[token..].iter().enumerate().take(tokens) {
            let to = to.wrapping_add((token + row) * stride + column);
            // SAFETY: by this function's contract.
            let to = unsafe { std::slice::from_raw_parts_mut(to, columns) };
            for (to, tile) in to.iter_mut().zip(&tile) {
                *to = X::round(tile[row] * *factor);
            }
        }
    }
}

/// Returns the first row and column of each tile.
fn tiles(rows: usize, columns: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(TILE).flat_map(move |row| (0..columns).step_by(TILE).map(move |column| (row, column)))
}

/// Returns the parts of a pair of blocks in which a query sees a key: keys, and the first lane of the queries.
pub(super) fn visible(keys: Range<usize>, first_query: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
    let count = keys.len();
    let on_diagonal = keys.end > first_query + 1;
    let step = if on_diagonal { STEP } else { count };
    (0..count).step_by(step.max(1)).map(move |key| {
        let lane = if on_diagonal { key } else { 0 };
        (key..(key + step).min(count), lane)
    })
}

/// Scratch memory of one worker, in parts that begin at cache lines.
pub(super) struct Scratch<R> {
    memory: Vec<R>,
    start: usize,
}

impl<R: Real> Scratch<R> {
    /// Memory for this many elements; each part is a multiple of a cache line's.
    pub(super) fn new(elements: usize) -> Self {
        const LINE: usize = 64;
        let memory = vec![R::ZERO; elements + LINE];
        let start = memory.as_ptr().align_offset(LINE).min(LINE);
        Self { memory, start }
    }

    pub(super) fn parts<const N: usize>(&mut self, sizes: [usize; N]) -> [&mut [R]; N] {
        let mut rest = &mut self.memory[self.start..];
        sizes.map(|size| {
            let (part, more) = std::mem::take(&mut rest).split_at_mut(size);
            rest = more;
            part
        })
    }
}
