//! A block of queries and a block of keys in backward.

use std::ops::Range;

use pulp::Simd;

use super::Pass;
use super::block::{BLOCK, Heads, LANES, Rows, rows, transposed};
use super::forward::{cap, mask};
use super::product::Product;
use crate::simd::{Element, Real};

/// A block of queries of one head, in the compute type.
pub(super) struct QueryBlock<R> {
    pub(super) count: usize,
    /// d_i = g_i·o_i.
    means: [R; BLOCK],
    /// L_i.
    log_sums: [R; BLOCK],
    pub(super) q: Rows<R>,
    /// g.
    pub(super) upstream: Rows<R>,
}

impl<R: Real> QueryBlock<R> {
    /// Loads the block of queries from token `first` on. Writes c·q transposed, q, g transposed and g to `memory`: q and g as rows only
    /// where these are not used in place.
    ///
    /// # Safety
    /// The rows lie in their tensors, of elements `X`, and nothing writes them meanwhile.
    #[inline(always)]
    pub(super) unsafe fn load<X: Element<Compute = R>>(
        pass: &Pass,
        upstream: Heads,
        [batch, head, first]: [usize; 3],
        [q_transposed, q_rows, upstream_transposed, upstream_rows]: [&mut [R]; 4],
    ) -> Self {
        let count = BLOCK.min(pass.tokens - first);
        let size = [count, pass.head];
        let (mut means, mut log_sums) = ([R::ZERO; BLOCK], [R::ZERO; BLOCK]);
        // SAFETY: by this function's contract.
        unsafe {
            let (from, stride) = (pass.q.row::<X>(batch, head, first), pass.q.row_stride());
            transposed(from, stride, size, R::from_f64(pass.scale), q_transposed);
            let q = rows(from.cast_const(), stride, size, q_rows);
            let (from, stride) = (upstream.row::<X>(batch, head, first), upstream.row_stride());
            transposed(from, stride, size, R::ONE, upstream_transposed);
            let upstream = rows(from.cast_const(), stride, size, upstream_rows);
            for (token, mean) in means.iter_mut().enumerate().take(count) {
                let o = std::slice::from_raw_parts(pass.o.row::<X>(batch, head, first + token), pass.head);
                let upstream = std::slice::from_raw_parts(from.add(token * stride), pass.head);
                *mean = dot(o, upstream);
            }
            log_sums[..count].copy_from_slice(pass.log_sums::<R>(batch, head, first, count));
            Self { count, means, log_sums, q, upstream }
        }
    }
}

/// A block of queries of one head, and a block of keys.
pub(super) struct BlockPair<'a, R> {
    pub(super) pass: &'a Pass,
    pub(super) block: &'a QueryBlock<R>,
    /// c·q and g, transposed.
    pub(super) q: &'a [R],
    pub(super) upstream: &'a [R],
    pub(super) keys: Rows<R>,
    pub(super) values: Rows<R>,
    /// The first key and the first query.
    pub(super) first: [usize; 2],
}

impl<R: Real> BlockPair<'_, R> {
    /// Writes the weights p_ij to `scores` and the slopes z_ij to `slopes`: a row for each of `keys`, a lane for each query from `lane` on.
    ///
    /// # Safety
    /// The keys and values lie in memory that lives, and nothing else writes it meanwhile.
    #[inline(always)]
    pub(super) unsafe fn weigh<S: Simd>(
        &self,
        simd: S,
        keys: &Range<usize>,
        lane: usize,
        [scores, slopes]: [&mut [R]; 2],
    ) {
        // Scores c·q_i·k_j, and g_i·v_j in the memory of the slopes.
        let product = |rows: Rows<R>, b: &[R], to: &mut [R]| Product {
            to: to[keys.start * BLOCK + lane..].as_mut_ptr(),
            to_stride: BLOCK,
            a: rows.at.wrapping_add(keys.start * rows.stride),
            a_strides: [rows.stride, 1],
            b: b[lane..].as_ptr(),
            b_stride: BLOCK,
            rows: keys.len(),
            depth: self.pass.head,
            columns: BLOCK - lane,
            add: false,
        };
        // SAFETY: by this function's contract.
        unsafe {
            product(self.keys, self.q, scores).compute(simd);
            product(self.values, self.upstream, slopes).compute(simd);
        }
        cap(self.pass, scores, keys.clone(), lane);
        mask(self.pass, scores, self.first, keys.clone(), lane);
        let (means, log_sums) = (&self.block.means[lane..], &self.block.log_sums[lane..]);
        for key in keys.clone() {
            let lanes = key * BLOCK + lane..(key + 1) * BLOCK;
            weigh(self.pass, [&mut scores[lanes.clone()], &mut slopes[lanes]], [means, log_sums]);
        }
    }

    /// Adds c·Σ_j z_ij·k_j over `keys` to the gradients of the queries, transposed.
    ///
    /// # Safety
    /// As [`BlockPair::weigh`].
    #[inline(always)]
    pub(super) unsafe fn add_to_queries<S: Simd>(
        &self,
        simd: S,
        keys: &Range<usize>,
        lane: usize,
        slopes: &[R],
        gradient: &mut [R],
    ) {
        let product = Product {
            to: gradient[lane..].as_mut_ptr(),
            to_stride: BLOCK,
            a: self.keys.at.wrapping_add(keys.start * self.keys.stride),
            a_strides: [1, self.keys.stride],
            b: slopes[keys.start * BLOCK + lane..].as_ptr(),
            b_stride: BLOCK,
            rows: self.pass.head,
            depth: keys.len(),
            columns: BLOCK - lane,
            add: true,
        };
        // SAFETY: by this function's contract.
        unsafe { product.compute(simd) };
    }

    /// Adds to the sums of the gradients of `keys`, or of their values: c·Σ_i z_ij·q_i from the slopes and the queries, or Σ_i p_ij·g_i from
    /// the weights and g.
    ///
    /// # Safety
    /// The rows and the sums lie in memory that lives, and nothing else uses these sums meanwhile.
    #[inline(always)]
    pub(super) unsafe fn add_to_keys<S: Simd>(
        &self,
        simd: S,
        keys: &Range<usize>,
        lane: usize,
        (factors, rows): (&[R], Rows<R>),
        sums: &Rows<R>,
    ) {
        let product = Product {
            to: sums.at.cast_mut().wrapping_add((self.first[0] + keys.start) * sums.stride),
            to_stride: sums.stride,
            a: factors[keys.start * BLOCK + lane..].as_ptr(),
            a_strides: [BLOCK, 1],
            b: rows.at.wrapping_add(lane * rows.stride),
            b_stride: rows.stride,
            rows: keys.len(),
            depth: self.block.count - lane,
            columns: self.pass.head.next_multiple_of(LANES),
            add: true,
        };
        // SAFETY: by this function's contract.
        unsafe { product.compute(simd) };
    }
}

/// Turns the scores of a key into weights p_ij = exp(s_ij − L_i), and g_i·v_j into slopes c·p_ij·(g_i·v_j − d_i), times the derivative of a
/// cap.
#[inline(always)]
fn weigh<R: Real>(pass: &Pass, [scores, slopes]: [&mut [R]; 2], [means, log_sums]: [&[R]; 2]) {
    let scale = R::from_f64(pass.scale);
    for (slope, mean) in slopes.iter_mut().zip(means) {
        *slope = (*slope - *mean) * scale;
    }
    bend(pass, scores, slopes);
    for ((score, slope), log_sum) in scores.iter_mut().zip(slopes).zip(log_sums) {
        *score = (*score - *log_sum).exp_of_negative();
        *slope = *score * *slope;
    }
}

/// Multiplies slopes by the derivative of a capped score s' = c·tanh(s/c), 1 − (s'/c)², if there is a cap.
#[inline(always)]
fn bend<R: Real>(pass: &Pass, scores: &[R], slopes: &mut [R]) {
    let Some(cap) = pass.cap else { return };
    let (least, share) = (R::from_f64(-cap), R::from_f64(1.0 / cap));
    for (slope, score) in slopes.iter_mut().zip(scores) {
        // The score of a hidden key is −∞.
        let tanh = if *score > least { *score } else { least } * share;
        *slope = *slope * (R::ONE - tanh * tanh);
    }
}

/// Returns the product of two rows, in the compute type.
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
