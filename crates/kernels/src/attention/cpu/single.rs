//! One query of each head over stored keys and values, as in generation.
//!
//! A unit of work is a head of keys with its group of queries and [`CHUNK`] keys, so that each key and value is read once, by one thread, and
//! a long row is work for several. Units leave the largest score, the sum and the unnormalised output; [`join`] adds them up in order.

use std::marker::PhantomData;
use std::ops::Range;

use pulp::{Simd, WithSimd};
use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use super::block::{BLOCK, Heads, LANES, Scratch, rows};
use super::{NAME, workers};
use crate::operands::{Access, Operands};
use crate::simd::{self, Element, Real};

/// Keys of a unit.
const CHUNK: usize = 512;
/// Vectors of the output that are in registers while values are added.
const VECTORS: usize = 4;

/// The tensors of attention of one query: q, o `[batch, heads, head]`, k, v `[batch, kv_heads, keys, head]`, of one dtype.
pub(crate) struct Single<'a> {
    pub(crate) q: &'a Tensor,
    pub(crate) k: &'a Tensor,
    pub(crate) v: &'a Tensor,
    pub(crate) o: &'a Tensor,
    /// `[batch, keys]`, bool, dense rows: which keys are seen.
    pub(crate) mask: Option<&'a Tensor>,
    /// `[heads]`, contiguous, of the dtype that is computed in.
    pub(crate) sinks: Option<&'a Tensor>,
}

#[derive(Clone, Copy)]
struct Pass {
    keys: usize,
    head: usize,
    group: usize,
    kv_heads: usize,
    chunks: usize,
    scale: f64,
    cap: Option<f64>,
    q: Heads,
    k: Heads,
    v: Heads,
    o: Heads,
    /// The mask's address and its stride of rows.
    mask: Option<(usize, usize)>,
    /// `[heads]` of the compute type.
    sinks: Option<usize>,
    /// `[units, group, head padded + LANES]` of the compute type.
    partial: usize,
}

impl Pass {
    fn partial_width(&self) -> usize {
        self.head.next_multiple_of(LANES) + LANES
    }

    /// Returns a unit's partial result for a query: the output, then the largest score and the sum.
    ///
    /// # Safety
    /// The partial results are of this type, and nothing else uses this one meanwhile, or nothing writes it.
    unsafe fn partial<'a, R>(&self, unit: usize, query: usize) -> &'a mut [R] {
        let at = (unit * self.group + query) * self.partial_width();
        // SAFETY: by this function's contract.
        unsafe { std::slice::from_raw_parts_mut((self.partial as *mut R).add(at), self.partial_width()) }
    }
}

/// Computes `o`; scores are multiplied by `scale`, and with a `cap` c become c·tanh(s/c).
///
/// # Errors
/// Shapes, dtypes or strides that do not fit.
pub(crate) fn single(tensors: &Single<'_>, scale: f64, cap: Option<f64>) -> Result<()> {
    let run = match tensors.q.kind() {
        Kind::Double => single_of::<f64>,
        Kind::BFloat16 => single_of::<half::bf16>,
        Kind::Half => single_of::<half::f16>,
        _ => single_of::<f32>,
    };
    run(tensors, scale, cap)?;
    bump_version(tensors.o)
}

fn single_of<X: Element>(tensors: &Single<'_>, scale: f64, cap: Option<f64>) -> Result<()> {
    let &Single { q, k, v, o, mask, sinks } = tensors;
    let (batch, heads, head) = q.size3()?;
    let (_, kv_heads, keys, _) = k.size4()?;
    if kv_heads < 1 || heads % kv_heads != 0 || keys < 1 {
        let (q, k) = (q.size(), k.size());
        let reason = format!("q is {q:?}, k {k:?}; expected keys, and a multiple of k's heads for q");
        return Err(Error::invalid(NAME, reason));
    }
    let kind = q.kind();
    let (size_of_queries, size_of_keys) = ([batch, heads, 1, head], [batch, kv_heads, keys, head]);
    let mut operands = Operands::new(NAME, Device::Cpu);
    // A mask that is shared by the batch has a stride of 0.
    let mask = mask
        .map(|mask| operands.heads(Access::Read, "mask", mask, Kind::Bool, &[batch, keys]))
        .transpose()?;
    if q.numel() == 0 {
        return Ok(());
    }
    let chunks = (keys as usize).div_ceil(CHUNK);
    let units = batch as usize * kv_heads as usize * chunks;
    let group = (heads / kv_heads) as usize;
    let mut pass = Pass {
        keys: keys as usize,
        head: head as usize,
        group,
        kv_heads: kv_heads as usize,
        chunks,
        scale,
        cap,
        q: Heads::new(&mut operands, Access::Read, "q", &q.f_unsqueeze(2)?, kind, &size_of_queries, None)?,
        k: Heads::new(&mut operands, Access::Read, "k", k, kind, &size_of_keys, None)?,
        v: Heads::new(&mut operands, Access::Read, "v", v, kind, &size_of_keys, None)?,
        o: Heads::new(&mut operands, Access::Write, "o", &o.f_unsqueeze(2)?, kind, &size_of_queries, None)?,
        mask: match &mask {
            Some(mask) => Some((mask.range()?.start, mask.stride()[0] as usize)),
            None => None,
        },
        sinks: sinks
            .map(|sinks| operands.contiguous(Access::Read, "sinks", sinks, X::Compute::KIND, &[heads][..]))
            .transpose()?,
        partial: 0,
    };
    operands.check()?;
    let partial =
        Tensor::f_empty([(units * group * pass.partial_width()) as i64], (X::Compute::KIND, Device::Cpu))?;
    pass.partial = partial.data_ptr() as usize;
    let pass = &pass;
    workers(units, |_, next| {
        let padded = pass.head.next_multiple_of(LANES);
        let mut scratch = Scratch::new(2 * BLOCK * padded + group * padded + group * BLOCK);
        while let Some(unit) = next() {
            simd::arch().dispatch(Unit::<X> { pass, unit, scratch: &mut scratch, element: PhantomData });
        }
    })?;
    for key_head in 0..batch as usize * pass.kv_heads {
        for query in 0..group {
            join::<X>(pass, key_head, query);
        }
    }
    Ok(())
}

/// A head of keys with its queries, and a chunk of the keys.
struct Unit<'a, X: Element> {
    pass: &'a Pass,
    unit: usize,
    scratch: &'a mut Scratch<X::Compute>,
    element: PhantomData<X>,
}

impl<X: Element> WithSimd for Unit<'_, X> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { pass, unit, scratch, .. } = self;
        let (key_head, chunk) = (unit / pass.chunks, unit % pass.chunks);
        let (batch, kv_head) = (key_head / pass.kv_heads, key_head % pass.kv_heads);
        let (width, padded) = (pass.head, pass.head.next_multiple_of(LANES));
        let [queries, scores, keys, values] =
            scratch.parts([pass.group * padded, pass.group * BLOCK, BLOCK * padded, BLOCK * padded]);
        let (zero, scale) = (X::Compute::ZERO, X::Compute::from_f64(pass.scale));
        for (query, to) in queries.chunks_exact_mut(padded).enumerate() {
            // SAFETY: the row lies in the tensor of queries, and the partial result is this unit's.
            unsafe {
                let from = pass.q.row::<X>(batch, kv_head * pass.group + query, 0);
                let from = std::slice::from_raw_parts(from, width);
                for (to, from) in to.iter_mut().zip(from) {
                    *to = from.widen() * scale;
                }
                let partial = pass.partial::<X::Compute>(unit, query);
                partial.fill(zero);
                partial[padded] = X::Compute::from_f64(-3e38);
            }
            to[width..].fill(zero);
        }
        let end = pass.keys.min((chunk + 1) * CHUNK);
        for start in (chunk * CHUNK..end).step_by(BLOCK) {
            let block = start..(start + BLOCK).min(end);
            let size = [block.len(), width];
            // SAFETY: the rows lie in the tensors of keys and values.
            let (keys, values) = unsafe {
                (
                    rows(pass.k.row::<X>(batch, kv_head, start), pass.k.row_stride(), size, keys),
                    rows(pass.v.row::<X>(batch, kv_head, start), pass.v.row_stride(), size, values),
                )
            };
            for key in 0..block.len() {
                // SAFETY: a row of a block lies in its tensor or in scratch memory, padded.
                let row = unsafe { std::slice::from_raw_parts(keys.at.add(key * keys.stride), padded) };
                for (query, scores) in queries.chunks_exact(padded).zip(scores.chunks_exact_mut(BLOCK)) {
                    scores[key] = dot::<X::Compute, S>(simd, query, row);
                }
            }
            for (query, scores) in scores.chunks_exact_mut(BLOCK).enumerate() {
                let scores = &mut scores[..block.len()];
                cap(pass, scores);
                mask(pass, batch, block.clone(), scores);
                // SAFETY: the partial result is this unit's.
                let partial = unsafe { pass.partial::<X::Compute>(unit, query) };
                let (o, softmax) = partial.split_at_mut(padded);
                let before = softmax[0];
                let mut most = before;
                for score in scores.iter() {
                    most = if *score > most { *score } else { most };
                }
                let shrink = (before - most).exp_of_negative();
                let mut sum = softmax[1] * shrink;
                for score in scores.iter_mut() {
                    *score = (*score - most).exp_of_negative();
                }
                for score in scores.iter() {
                    sum += *score;
                }
                (softmax[0], softmax[1]) = (most, sum);
                // SAFETY: as of the keys.
                unsafe { add_rows::<X::Compute, S>(simd, o, shrink, scores, values.at, values.stride) };
            }
        }
    }
}

#[inline(always)]
fn dot<R: Real, S: Simd>(simd: S, a: &[R], b: &[R]) -> R {
    let mut sum = R::splat(simd, R::ZERO);
    for (a, b) in R::split::<S>(a).0.iter().zip(R::split::<S>(b).0) {
        sum = R::mul_add(simd, *a, *b, sum);
    }
    R::sum(simd, sum)
}

/// `o` times `shrink`, plus the values' rows, each times its weight.
///
/// # Safety
/// As many rows as there are weights lie at `values`, each as wide as `o`.
#[inline(always)]
unsafe fn add_rows<R: Real, S: Simd>(
    simd: S,
    o: &mut [R],
    shrink: R,
    weights: &[R],
    values: *const R,
    stride: usize,
) {
    let o = R::split_mut::<S>(o).0;
    let shrink = R::splat(simd, shrink);
    let mut first = 0;
    while first + VECTORS <= o.len() {
        // SAFETY: by this function's contract.
        unsafe {
            add::<R, S, VECTORS>(simd, &mut o[first..], shrink, weights, values, (stride, first));
        }
        first += VECTORS;
    }
    while first < o.len() {
        // SAFETY: likewise.
        unsafe { add::<R, S, 1>(simd, &mut o[first..], shrink, weights, values, (stride, first)) };
        first += 1;
    }
}

/// [`add_rows`] for `N` vectors, of the values' rows those from vector `first` on.
///
/// # Safety
/// As [`add_rows`].
#[inline(always)]
unsafe fn add<R: Real, S: Simd, const N: usize>(
    simd: S,
    o: &mut [R::Vector<S>],
    shrink: R::Vector<S>,
    weights: &[R],
    values: *const R,
    (stride, first): (usize, usize),
) {
    let zero = R::splat(simd, R::ZERO);
    let mut sums = [zero; N];
    for (sum, o) in sums.iter_mut().zip(o.iter()) {
        *sum = R::mul_add(simd, shrink, *o, zero);
    }
    for (key, weight) in weights.iter().enumerate() {
        let weight = R::splat(simd, *weight);
        // SAFETY: by this function's contract.
        let row = unsafe { values.add(key * stride).cast::<R::Vector<S>>().add(first) };
        for (vector, sum) in sums.iter_mut().enumerate() {
            // SAFETY: likewise; a vector may lie at any multiple of its elements' size.
            *sum = R::mul_add(simd, weight, unsafe { row.add(vector).read_unaligned() }, *sum);
        }
    }
    for (o, sum) in o.iter_mut().zip(sums) {
        *o = sum;
    }
}

#[inline(always)]
fn cap<R: Real>(pass: &Pass, scores: &mut [R]) {
    if let Some(cap) = pass.cap {
        let (cap, share) = (R::from_f64(cap), R::from_f64(1.0 / cap));
        for score in scores {
            *score = cap * (*score * share).tanh();
        }
    }
}

#[inline(always)]
fn mask<R: Real>(pass: &Pass, batch: usize, keys: Range<usize>, scores: &mut [R]) {
    if let Some((at, stride)) = pass.mask {
        // SAFETY: the row lies in the mask; a bool is a byte of 0 or 1.
        let seen = unsafe {
            std::slice::from_raw_parts((at as *const u8).add(batch * stride + keys.start), keys.len())
        };
        for (score, seen) in scores.iter_mut().zip(seen) {
            *score = if *seen == 0 { R::from_f64(f64::NEG_INFINITY) } else { *score };
        }
    }
}

/// Returns the output of a query, from what the units of its head of keys left.
fn join<X: Element>(pass: &Pass, key_head: usize, query: usize) {
    let padded = pass.head.next_multiple_of(LANES);
    // SAFETY: all units have ended.
    let partial = |chunk: usize| unsafe { pass.partial::<X::Compute>(key_head * pass.chunks + chunk, query) };
    let (batch, kv_head) = (key_head / pass.kv_heads, key_head % pass.kv_heads);
    let query_head = kv_head * pass.group + query;
    let mut most = partial(0)[padded];
    for chunk in 1..pass.chunks {
        let other = partial(chunk)[padded];
        most = if other > most { other } else { most };
    }
    // SAFETY: nothing writes the sinks, which are of this type.
    let sink = |at: usize| unsafe { *(at as *const X::Compute).add(query_head) };
    let sink = pass.sinks.map(sink);
    most = sink.filter(|sink| *sink > most).unwrap_or(most);
    let factor = |chunk: usize| (partial(chunk)[padded] - most).exp_of_negative();
    let mut sum = X::Compute::ZERO;
    for chunk in 0..pass.chunks {
        sum += partial(chunk)[padded + 1] * factor(chunk);
    }
    if let Some(sink) = sink {
        sum += (sink - most).exp_of_negative();
    }
    // SAFETY: the row lies in the output, and nothing else uses it.
    let to = unsafe {
        let to = pass.o.row::<X>(batch, query_head, 0);
        std::slice::from_raw_parts_mut(to, pass.head)
    };
    let first = partial(0);
    if pass.chunks > 1 || sink.is_some() {
        let first_factor = factor(0);
        for value in &mut first[..padded] {
            *value = *value * first_factor;
        }
        for chunk in 1..pass.chunks {
            let factor = factor(chunk);
            for (value, other) in first[..padded].iter_mut().zip(&*partial(chunk)) {
                *value += *other * factor;
            }
        }
    }
    let share = X::Compute::ONE / sum;
    for (to, value) in to.iter_mut().zip(&*first) {
        *to = X::round(*value * share);
    }
}
