//! The output and the log-sum-exp of a block of queries.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::Pass;
use super::block::{BLOCK, LANES, Scratch, rows, transposed, untransposed, visible};
use super::product::Product;
use super::sink::close;
use crate::simd::{Element, Real};

/// Returns the number of elements of scratch memory that a worker needs.
pub(super) fn scratch<X: Element>(head: usize) -> Scratch<X::Compute> {
    let padded = head.next_multiple_of(LANES);
    Scratch::new(BLOCK * BLOCK + 4 * BLOCK * padded)
}

/// A block of queries of one head.
pub(super) struct Block<'a, X: Element> {
    pub(super) pass: &'a Pass,
    pub(super) batch: usize,
    pub(super) head: usize,
    pub(super) first: usize,
    pub(super) scratch: &'a mut Scratch<X::Compute>,
    pub(super) element: PhantomData<X>,
}

impl<X: Element> WithSimd for Block<'_, X> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { pass, batch, head, first, scratch, .. } = self;
        let width = pass.head;
        let padded = width.next_multiple_of(LANES);
        let [scores, q, o, keys, values] =
            scratch.parts([BLOCK * BLOCK, padded * BLOCK, padded * BLOCK, padded * BLOCK, padded * BLOCK]);
        let queries = BLOCK.min(pass.tokens - first);
        let kv_head = head / pass.group;
        let mut most = [X::Compute::from_f64(-3e38); BLOCK];
        let mut sums = [X::Compute::ZERO; BLOCK];
        // c·q, transposed: a lane for each query.
        // SAFETY: the row lies in the tensor of queries.
        unsafe {
            let from = pass.q.row::<X>(batch, head, first);
            transposed(from, pass.q.row_stride(), [queries, width], X::Compute::from_f64(pass.scale), q);
        }
        o.fill(X::Compute::ZERO);
        let begin = pass.first_key(first);
        for start in (begin..first + queries).step_by(BLOCK) {
            let block = start..(start + BLOCK).min(first + queries);
            let size = [block.len(), width];
            // SAFETY: the rows lie in the tensors of keys and values.
            let (keys, values) = unsafe {
                (
                    rows(pass.k.row::<X>(batch, kv_head, start), pass.k.row_stride(), size, keys),
                    rows(pass.v.row::<X>(batch, kv_head, start), pass.v.row_stride(), size, values),
                )
            };
            // Scores s_ij, and the largest of each query so far.
            let mut after = most;
            for (keys_here, lane) in visible(block.clone(), first) {
                let product = Product {
                    to: scores[keys_here.start * BLOCK + lane..].as_mut_ptr(),
                    to_stride: BLOCK,
                    a: keys.at.wrapping_add(keys_here.start * keys.stride),
                    a_strides: [keys.stride, 1],
                    b: q[lane..].as_ptr(),
                    b_stride: BLOCK,
                    rows: keys_here.len(),
                    depth: width,
                    columns: BLOCK - lane,
                    add: false,
                };
                // SAFETY: the keys lie in their tensor or in scratch memory, as the scores and the queries do.
                unsafe { product.compute(simd) };
                cap(pass, scores, keys_here.clone(), lane);
                mask(pass, scores, [start, first], keys_here.clone(), lane);
                fold(simd, &mut after, scores, keys_here, lane, Fold::Largest);
            }
            // Sums and outputs of earlier blocks are multiplied by exp(m_before − m_after).
            if start > begin {
                rescale(most, &after, &mut sums, o);
            }
            most = after;
            // Weights exp(s_ij − m), their sums, and their products with the values.
            for (keys_here, lane) in visible(block.clone(), first) {
                for key in keys_here.clone() {
                    let scores = &mut scores[key * BLOCK + lane..(key + 1) * BLOCK];
                    for (score, most) in scores.iter_mut().zip(&most[lane..]) {
                        *score = (*score - *most).exp_of_negative();
                    }
                }
                fold(simd, &mut sums, scores, keys_here.clone(), lane, Fold::Sum);
                let product = Product {
                    to: o[lane..].as_mut_ptr(),
                    to_stride: BLOCK,
                    a: values.at.wrapping_add(keys_here.start * values.stride),
                    a_strides: [1, values.stride],
                    b: scores[keys_here.start * BLOCK + lane..].as_ptr(),
                    b_stride: BLOCK,
                    rows: width,
                    depth: keys_here.len(),
                    columns: BLOCK - lane,
                    add: true,
                };
                // SAFETY: as above.
                unsafe { product.compute(simd) };
            }
        }
        // o_i is divided by its sum, and L_i = m + ln Σ.
        // SAFETY: nothing writes the sinks.
        let shares = close(unsafe { pass.sink(head) }, &mut most, &mut sums);
        // SAFETY: the rows lie in the outputs, and no other task has this block of this head.
        unsafe {
            let to = pass.o.row::<X>(batch, head, first);
            untransposed(o, &shares, [queries, width], to, pass.o.row_stride());
            let to = pass.log_sums::<X::Compute>(batch, head, first, queries);
            for ((to, most), sum) in to.iter_mut().zip(&most).zip(&sums) {
                *to = *most + X::Compute::from_f64(sum.to_f64().ln());
            }
        }
    }
}

/// Multiplies the sums and the output, transposed, by exp(before − after).
#[inline(always)]
fn rescale<R: Real>(before: [R; BLOCK], after: &[R; BLOCK], sums: &mut [R; BLOCK], o: &mut [R]) {
    let mut shrink = before;
    for (shrink, after) in shrink.iter_mut().zip(after) {
        *shrink = (*shrink - *after).exp_of_negative();
    }
    for (sum, shrink) in sums.iter_mut().zip(&shrink) {
        *sum = *sum * *shrink;
    }
    for row in o.chunks_exact_mut(BLOCK) {
        for (o, shrink) in row.iter_mut().zip(&shrink) {
            *o = *o * *shrink;
        }
    }
}

#[derive(Clone, Copy)]
enum Fold {
    Largest,
    Sum,
}

/// Folds the scores of each query from `lane` on into its element of `to`, over the keys in order.
#[inline(always)]
fn fold<R: Real, S: Simd>(
    simd: S,
    to: &mut [R; BLOCK],
    scores: &[R],
    keys: Range<usize>,
    lane: usize,
    by: Fold,
) {
    for (vector, to) in R::split_mut::<S>(&mut to[lane..]).0.iter_mut().enumerate() {
        for row in scores.chunks_exact(BLOCK).skip(keys.start).take(keys.len()) {
            let score = R::split::<S>(&row[lane..]).0[vector];
            *to = match by {
                Fold::Largest => R::larger(simd, score, *to),
                Fold::Sum => R::plus(simd, *to, score),
            };
        }
    }
}

/// Replaces the scores s of a part of a block by c·tanh(s/c), if there is a cap.
#[inline(always)]
pub(super) fn cap<R: Real>(pass: &Pass, scores: &mut [R], keys: Range<usize>, lane: usize) {
    let Some(cap) = pass.cap else { return };
    let (cap, share) = (R::from_f64(cap), R::from_f64(1.0 / cap));
    for key in keys {
        for score in &mut scores[key * BLOCK + lane..(key + 1) * BLOCK] {
            *score = cap * (*score * share).tanh();
        }
    }
}

/// Makes the scores of keys after their queries, and of those before the window, −∞, of a part of a block.
#[inline(always)]
pub(super) fn mask<R: Real>(
    pass: &Pass,
    scores: &mut [R],
    [first_key, first_query]: [usize; 2],
    keys: Range<usize>,
    lane: usize,
) {
    let hide = |scores: &mut [R]| scores.fill(R::from_f64(f64::NEG_INFINITY));
    if first_key + keys.end > first_query + lane + 1 {
        for key in keys.clone() {
            // Queries before the key.
            let hidden = (first_key + key).saturating_sub(first_query).min(BLOCK);
            hide(&mut scores[key * BLOCK + lane.min(hidden)..key * BLOCK + hidden]);
        }
    }
    for key in keys {
        // Queries whose window is after the key.
        let seen = (first_key + key).saturating_add(pass.window).saturating_sub(first_query).max(lane);
        if seen >= BLOCK {
            break;
        }
        hide(&mut scores[key * BLOCK + seen..(key + 1) * BLOCK]);
    }
}
