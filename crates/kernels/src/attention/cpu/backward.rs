//! The gradients of queries, keys and values.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::Pass;
use super::block::{BLOCK, Heads, LANES, Rows, Scratch, in_place, rows, untransposed, visible};
use super::pair::{BlockPair, QueryBlock};
use crate::simd::{Element, Real};

/// The gradients that backward reads and writes, beside the tensors of forward.
#[derive(Clone, Copy)]
pub(super) struct Gradients {
    /// The gradient of the output.
    pub(super) o: Heads,
    pub(super) q: Heads,
    pub(super) k: Heads,
    pub(super) v: Heads,
}

impl Gradients {
    /// The same from a token of each row on.
    pub(super) fn starting_at<X>(self, token: usize) -> Self {
        let Self { o, q, k, v } = self;
        let [o, q, k, v] = [o, q, k, v].map(|heads| heads.starting_at::<X>(token));
        Self { o, q, k, v }
    }
}

/// Returns the number of elements of scratch memory that a worker needs.
pub(super) fn scratch<X: Element>(head: usize) -> Scratch<X::Compute> {
    let padded = head.next_multiple_of(LANES);
    Scratch::new(2 * BLOCK * BLOCK + 7 * BLOCK * padded)
}

/// Returns the number of elements that one worker sums gradients of keys and values in; 0 where they are summed in place.
pub(super) fn sums<X: Element>(tokens: usize, head: usize) -> usize {
    if in_place::<X>(head) { 0 } else { 2 * tokens * head.next_multiple_of(LANES) }
}

/// A head of keys, or some blocks of it, with all of its queries.
pub(super) struct Keys<'a, X: Element> {
    pub(super) pass: &'a Pass,
    pub(super) gradients: Gradients,
    pub(super) batch: usize,
    /// Of keys and values.
    pub(super) head: usize,
    pub(super) keys: Range<usize>,
    pub(super) parts: Parts,
    pub(super) scratch: &'a mut Scratch<X::Compute>,
    /// [`sums`] elements.
    pub(super) sums: *mut X::Compute,
    pub(super) element: PhantomData<X>,
}

/// Which gradients are computed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Parts {
    All,
    /// Of one block of queries of one head.
    Queries {
        head: usize,
        first: usize,
    },
    KeysAndValues,
}

impl<X: Element> WithSimd for Keys<'_, X> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { pass, gradients, batch, head: kv_head, keys: span, parts, scratch, sums, .. } = self;
        let width = pass.head;
        let padded = width.next_multiple_of(LANES);
        let block = padded * BLOCK;
        let [scores, slopes, q, upstream, q_gradient, keys, values, q_rows, upstream_rows] =
            scratch.parts([BLOCK * BLOCK, BLOCK * BLOCK, block, block, block, block, block, block, block]);
        let with_keys = !matches!(parts, Parts::Queries { .. });
        let with_queries = parts != Parts::KeysAndValues;
        // Σ_i z_ij·q_i and Σ_i p_ij·g_i begin at 0.
        // SAFETY: the rows lie in the gradients or in the worker's sums, which nothing else uses meanwhile.
        let [key_sums, value_sums] = unsafe { sums_of::<X>(pass, gradients, batch, kv_head, sums) };
        if with_keys {
            for sums in [&key_sums, &value_sums] {
                for token in span.clone() {
                    let row = sums.at.cast_mut().wrapping_add(token * sums.stride);
                    // SAFETY: as above.
                    unsafe { std::slice::from_raw_parts_mut(row, padded) }.fill(X::Compute::ZERO);
                }
            }
        }
        // The queries that see one of the keys.
        let (heads, first_queries) = match parts {
            Parts::Queries { head, first } => (head..head + 1, first..first + 1),
            // Earlier queries see none of the keys, nor do those whose windows are after them.
            _ => {
                let end = pass.end_of_queries(span.end.saturating_sub(1));
                (kv_head * pass.group..(kv_head + 1) * pass.group, span.start..end)
            }
        };
        // For each block of queries, the blocks of keys that they see.
        for head in heads {
            for first in first_queries.clone().step_by(BLOCK) {
                // SAFETY: the rows lie in their tensors.
                let block = unsafe {
                    let memory = [&mut *q, &mut *q_rows, &mut *upstream, &mut *upstream_rows];
                    QueryBlock::load::<X>(pass, gradients.o, [batch, head, first], memory)
                };
                if with_queries {
                    q_gradient.fill(X::Compute::ZERO);
                }
                // Weights and slopes of each pair of blocks, and their parts of the gradients.
                let begin = span.start.max(pass.first_key(first));
                for start in (begin..span.end.min(first + block.count)).step_by(BLOCK) {
                    let key_block = start..(start + BLOCK).min(first + block.count);
                    let size = [key_block.len(), width];
                    // SAFETY: as above.
                    let (keys, values) = unsafe {
                        let k = pass.k.row::<X>(batch, kv_head, start).cast_const();
                        let v = pass.v.row::<X>(batch, kv_head, start).cast_const();
                        (rows(k, pass.k.row_stride(), size, keys), rows(v, pass.v.row_stride(), size, values))
                    };
                    let pair =
                        BlockPair { pass, block: &block, q, upstream, keys, values, first: [start, first] };
                    for (seen, lane) in visible(key_block, first) {
                        // SAFETY: all lie in their tensors, in scratch memory or in the sums; no other task has these keys of this head.
                        unsafe {
                            pair.weigh(simd, &seen, lane, [scores, slopes]);
                            if with_queries {
                                pair.add_to_queries(simd, &seen, lane, slopes, q_gradient);
                            }
                            if with_keys && lane < block.count {
                                pair.add_to_keys(simd, &seen, lane, (scores, block.upstream), &value_sums);
                                pair.add_to_keys(simd, &seen, lane, (slopes, block.q), &key_sums);
                            }
                        }
                    }
                }
                // The gradient of q, transposed back and rounded.
                if with_queries {
                    // SAFETY: the rows lie in the gradient, and no other task has this block of this head.
                    unsafe {
                        let (to, stride) =
                            (gradients.q.row::<X>(batch, head, first), gradients.q.row_stride());
                        untransposed(q_gradient, &[X::Compute::ONE; BLOCK], [block.count, width], to, stride);
                    }
                }
            }
        }
        // Sums outside the gradients are rounded into them once.
        if with_keys && !in_place::<X>(width) {
            for (sums, to) in [(&key_sums, gradients.k), (&value_sums, gradients.v)] {
                for token in span.clone() {
                    // SAFETY: the rows lie in the sums and in the gradients; no other task has these keys of this head.
                    unsafe {
                        let from = std::slice::from_raw_parts(sums.at.add(token * sums.stride), width);
                        let to = std::slice::from_raw_parts_mut(to.row::<X>(batch, kv_head, token), width);
                        for (to, from) in to.iter_mut().zip(from) {
                            *to = X::round(*from);
                        }
                    }
                }
            }
        }
    }
}

/// Returns where the gradients of keys and values are summed, row by row from token 0 on.
///
/// # Safety
/// `sums` has [`sums`] elements.
unsafe fn sums_of<X: Element>(
    pass: &Pass,
    gradients: Gradients,
    batch: usize,
    head: usize,
    sums: *mut X::Compute,
) -> [Rows<X::Compute>; 2] {
    if in_place::<X>(pass.head) {
        return [gradients.k, gradients.v]
            .map(|to| Rows { at: to.row::<X>(batch, head, 0).cast_const().cast(), stride: to.row_stride() });
    }
    let stride = pass.head.next_multiple_of(LANES);
    [0, 1].map(|which| Rows { at: sums.wrapping_add(which * pass.tokens * stride).cast_const(), stride })
}
