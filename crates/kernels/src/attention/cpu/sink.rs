//! Sinks: a score of each head whose weight multiplies no value.

use runtime::Result;

use super::block::{BLOCK, Heads};
use super::{Pass, workers};
use crate::simd::{Element, Real};

/// Elements of a row that are multiplied at a time, each with a sum of its own.
const LANES: usize = 8;

/// Adds the weight of a sink to the sums of a block of queries, whose largest scores are `most`, and replaces each sum by its reciprocal: the
/// factor of the query's output. Returns the largest scores with the sink's.
#[inline(always)]
pub(super) fn close<R: Real>(sink: Option<R>, most: &mut [R; BLOCK], sums: &mut [R; BLOCK]) -> [R; BLOCK] {
    let mut shares = [R::ONE; BLOCK];
    if let Some(sink) = sink {
        for ((share, most), sum) in shares.iter_mut().zip(most.iter_mut()).zip(sums.iter_mut()) {
            let larger = if sink > *most { sink } else { *most };
            *share = (*most - larger).exp_of_negative();
            *sum = *sum * *share + (sink - larger).exp_of_negative();
            *most = larger;
        }
    }
    for (share, sum) in shares.iter_mut().zip(sums.iter()) {
        *share = *share / *sum;
    }
    shares
}

/// Writes the gradient of each head's sink a, −Σ exp(a − L_i)·⟨g_i, o_i⟩ over all queries in order, to `to`, `[heads]` of the compute type.
pub(super) fn gradient<X: Element>(pass: &Pass, upstream: Heads, batch: usize, to: usize) -> Result<()> {
    // A head's sum is one worker's.
    let of_head = |head: usize| {
        // SAFETY: `check` has compared the dtype, and the operands' overlap.
        let Some(sink) = (unsafe { pass.sink::<X::Compute>(head) }) else { return };
        let mut gradient = 0.0;
        for row in 0..batch {
            // SAFETY: forward has written them, and nothing writes them meanwhile.
            let log_sums = unsafe { pass.log_sums::<X::Compute>(row, head, 0, pass.tokens) };
            for (token, log_sum) in log_sums.iter().enumerate() {
                // SAFETY: the rows lie in the tensors of the output and its gradient.
                let (o, g) = unsafe {
                    (
                        std::slice::from_raw_parts(pass.o.row::<X>(row, head, token), pass.head),
                        std::slice::from_raw_parts(upstream.row::<X>(row, head, token), pass.head),
                    )
                };
                gradient -= (sink - *log_sum).to_f64().exp() * dot(o, g);
            }
        }
        // SAFETY: the element is this head's.
        unsafe { *(to as *mut X::Compute).add(head) = X::Compute::from_f64(gradient) };
    };
    workers(pass.heads, |_, next| {
        while let Some(head) = next() {
            of_head(head);
        }
    })
}

fn dot<X: Element>(a: &[X], b: &[X]) -> f64 {
    let mut sums = [X::Compute::ZERO; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a.widen() * b.widen();
        }
    }
    sums.into_iter().map(Real::to_f64).sum()
}
