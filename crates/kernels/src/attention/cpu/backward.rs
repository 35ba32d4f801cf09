//! The gradients of queries, keys and values.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::Pass;
use super::block::{BLOCK, Heads, LANES, Rows, Scratch, in_place, rows, transposed, untransposed, visible};
use super::forward::{cap, mask};
use super::product::Product;
use crate::simd::{Element, Real};

/// What backward reads and writes beside what forward does.
#[derive(Clone, Copy)]
pub(super) struct Gradients {
    /// The gradient of the output.
    pub(super) o: Heads,
    pub(super) q: Heads,
    pub(super) k: Heads,
    pub(super) v: Heads,
}

/// Elements of scratch memory that a worker needs.
pub(super) fn scratch<X: Element>(head: usize) -> Scratch<X::Compute> {
    let padded = head.next_multiple_of(LANES);
    Scratch::new(2 * BLOCK * BLOCK + 7 * BLOCK * padded)
}

/// Elements that one worker sums gradients of keys and values in; 0 where they are summed in place.
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
        let Self { pass, gradients, batch, head: of_keys, keys: span, parts, scratch, sums, .. } = self;
        let width = pass.head;
        let padded = width.next_multiple_of(LANES);
        let block = padded * BLOCK;
        let [scores, slopes, q, upstream, q_gradient, keys, values, q_rows, upstream_rows] =
            scratch.parts([BLOCK * BLOCK, BLOCK * BLOCK, block, block, block, block, block, block, block]);
        let scale = X::Compute::from_f64(pass.scale);
        let one = X::Compute::ONE;
        let with_keys = !matches!(parts, Parts::Queries { .. });
        let with_queries = parts != Parts::KeysAndValues;
        // SAFETY: the rows lie in the gradients or in the worker's sums, which nothing else uses meanwhile.
        let [key_sums, value_sums] = unsafe { sums_of::<X>(pass, gradients, batch, of_keys, sums) };
        if with_keys {
            for sums in [&key_sums, &value_sums] {
                for token in span.clone() {
                    // SAFETY: as above.
                    unsafe {
                        std::slice::from_raw_parts_mut(sums.at.cast_mut().add(token * sums.stride), padded)
                    }
                    .fill(X::Compute::ZERO);
                }
            }
        }
        let (heads, first_queries) = match parts {
            Parts::Queries { head, first } => (head..head + 1, first..first + 1),
            // Earlier queries see none of the keys, nor do those whose windows are after them.
            _ => {
                let end = pass.end_of_queries(span.end.saturating_sub(1));
                (of_keys * pass.group..(of_keys + 1) * pass.group, span.start..end)
            }
        };
        for head in heads {
            for first in first_queries.clone().step_by(BLOCK) {
                let queries = BLOCK.min(pass.tokens - first);
                let size = [queries, width];
                let mut means = [X::Compute::ZERO; BLOCK];
                // SAFETY: the rows lie in their tensors.
                let (q_here, upstream_here, log_sums) = unsafe {
                    let (from, stride) = (pass.q.row::<X>(batch, head, first), pass.q.row_stride());
                    transposed(from, stride, size, scale, q);
                    let q_here = rows(from.cast_const(), stride, size, q_rows);
                    let (from, stride) = (gradients.o.row::<X>(batch, head, first), gradients.o.row_stride());
                    transposed(from, stride, size, one, upstream);
                    let upstream_here = rows(from.cast_const(), stride, size, upstream_rows);
                    for (token, mean) in means.iter_mut().enumerate().take(queries) {
                        let o =
                            std::slice::from_raw_parts(pass.o.row::<X>(batch, head, first + token), width);
                        let upstream = std::slice::from_raw_parts(from.add(token * stride), width);
                        *mean = dot(o, upstream);
                    }
                    (q_here, upstream_here, pass.log_sums::<X::Compute>(batch, head, first, queries))
                };
                let mut log_sums_here = [X::Compute::ZERO; BLOCK];
                log_sums_here[..queries].copy_from_slice(log_sums);
                if with_queries {
                    q_gradient.fill(X::Compute::ZERO);
                }
                let begin = span.start.max(pass.first_key(first));
                for start in (begin..span.end.min(first + queries)).step_by(BLOCK) {
                    let block = start..(start + BLOCK).min(first + queries);
                    let size = [block.len(), width];
                    // SAFETY: as above.
                    let (keys, values) = unsafe {
                        (
                            rows(
                                pass.k.row::<X>(batch, of_keys, start).cast_const(),
                                pass.k.row_stride(),
                                size,
                                keys,
                            ),
                            rows(
                                pass.v.row::<X>(batch, of_keys, start).cast_const(),
                                pass.v.row_stride(),
                                size,
                                values,
                            ),
                        )
                    };
                    for (keys_here, lane) in visible(block.clone(), first) {
                        let from = keys_here.start * BLOCK + lane;
                        let lanes = BLOCK - lane;
                        let count = keys_here.len();
                        let of = |rows: Rows<X::Compute>, b: &[X::Compute], to: &mut [X::Compute]| Product {
                            to: to[from..].as_mut_ptr(),
                            to_stride: BLOCK,
                            a: rows.at.wrapping_add(keys_here.start * rows.stride),
                            a_strides: [rows.stride, 1],
                            b: b[lane..].as_ptr(),
                            b_stride: BLOCK,
                            rows: count,
                            depth: width,
                            columns: lanes,
                            add: false,
                        };
                        // SAFETY: all lie in their tensors or in parts of the scratch memory.
                        unsafe {
                            of(keys, q, scores).compute(simd);
                            of(values, upstream, slopes).compute(simd);
                        }
                        cap(pass, scores, keys_here.clone(), lane);
                        mask(pass, scores, [start, first], keys_here.clone(), lane);
                        for key in keys_here.clone() {
                            let lanes = key * BLOCK + lane..(key + 1) * BLOCK;
                            let (scores, slopes) = (&mut scores[lanes.clone()], &mut slopes[lanes]);
                            for (slope, mean) in slopes.iter_mut().zip(&means[lane..]) {
                                *slope = (*slope - *mean) * scale;
                            }
                            bend(pass, scores, slopes);
                            let of_pair = scores.iter_mut().zip(slopes);
                            for ((score, slope), log_sum) in of_pair.zip(&log_sums_here[lane..]) {
                                *score = (*score - *log_sum).exp_of_negative();
                                *slope = *score * *slope;
                            }
                        }
                        if with_queries {
                            let product = Product {
                                to: q_gradient[lane..].as_mut_ptr(),
                                to_stride: BLOCK,
                                a: keys.at.wrapping_add(keys_here.start * keys.stride),
                                a_strides: [1, keys.stride],
                                b: slopes[from..].as_ptr(),
                                b_stride: BLOCK,
                                rows: width,
                                depth: count,
                                columns: lanes,
                                add: true,
                            };
                            // SAFETY: as above.
                            unsafe { product.compute(simd) };
                        }
                        if with_keys && lane < queries {
                            let of = |sums: &Rows<X::Compute>,
                                      weights: &[X::Compute],
                                      rows: Rows<X::Compute>| Product {
                                to: sums.at.cast_mut().wrapping_add((start + keys_here.start) * sums.stride),
                                to_stride: sums.stride,
                                a: weights[from..].as_ptr(),
                                a_strides: [BLOCK, 1],
                                b: rows.at.wrapping_add(lane * rows.stride),
                                b_stride: rows.stride,
                                rows: count,
                                depth: queries - lane,
                                columns: padded,
                                add: true,
                            };
                            // SAFETY: as above; no other task has these keys of this head.
                            unsafe {
                                of(&value_sums, scores, upstream_here).compute(simd);
                                of(&key_sums, slopes, q_here).compute(simd);
                            }
                        }
                    }
                }
                if with_queries {
                    // SAFETY: the rows lie in the gradient, and no other task has this block of this head.
                    unsafe {
                        let to = gradients.q.row::<X>(batch, head, first);
                        untransposed(
                            q_gradient,
                            &[one; BLOCK],
                            [queries, width],
                            to,
                            gradients.q.row_stride(),
                        );
                    }
                }
            }
        }
        if with_keys && !in_place::<X>(width) {
            for (sums, to) in [(&key_sums, gradients.k), (&value_sums, gradients.v)] {
                for token in span.clone() {
                    // SAFETY: the rows lie in the sums and in the gradients; no other task has these keys of this head.
                    unsafe {
                        let from = std::slice::from_raw_parts(sums.at.add(token * sums.stride), width);
                        let to = std::slice::from_raw_parts_mut(to.row::<X>(batch, of_keys, token), width);
                        for (to, from) in to.iter_mut().zip(from) {
                            *to = X::round(*from);
                        }
                    }
                }
            }
        }
    }
}

/// Multiplies slopes by the derivative of a capped score s' = c·tanh(s/c), 1 − (s'/c)², if there is a cap.
#[inline(always)]
fn bend<R: Real>(pass: &Pass, scores: &[R], slopes: &mut [R]) {
    let Some(cap) = pass.cap else { return };
    let (least, share) = (R::from_f64(-cap), R::from_f64(1.0 / cap));
    for (slope, score) in slopes.iter_mut().zip(scores) {
        // What is hidden is −∞.
        let tanh = if *score > least { *score } else { least } * share;
        *slope = *slope * (R::ONE - tanh * tanh);
    }
}

/// Where the gradients of keys and values are summed, row by row from token 0 on.
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

/// The product of two rows, in the compute type.
#[inline(always)]
fn dot<X: Element>(a: &[X], b: &[X]) -> X::Compute {
    let mut sums = [X::Compute::ZERO; LANES];
    let (a, b) = (a.chunks(LANES), b.chunks(LANES));
    for (a, b) in a.zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a.widen() * b.widen();
        }
    }
    sums.into_iter().fold(X::Compute::ZERO, |sum, lane| sum + lane)
}
