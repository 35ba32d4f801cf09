//! Causal attention on the CPU, block by block: the checks that make the passes sound.
//!
//! A block is 64 queries by 64 keys. Scores are kept transposed, a row for each key and a lane for each query, so that the running maxima
//! and sums of the softmax are vectors, and all five products of a pair of blocks multiply a broadcast element with dense rows: only the
//! queries and the upstream gradient are transposed, once for all of their keys.

mod backward;
mod block;
mod forward;
mod pair;
mod product;
mod single;
mod sink;

use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};

use backward::{Gradients, Keys, Parts};
use block::{BLOCK, Heads};
use half::{bf16, f16};
use runtime::parallel;
use runtime::tensor_layout::TensorLayout;
use runtime::{Error, Result};
use smallvec::SmallVec;
use tch::{Device, Kind, Tensor};

use crate::operands::{Access, Operands};
use crate::simd::{self, Element, Real};
pub(crate) use single::{Single, single};

pub(crate) const NAME: &str = "causal attention";

/// Positions of a row whose queries see each other's keys: a whole row, or a document of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) row: usize,
    /// Its first position in the row.
    pub(crate) first: usize,
    pub(crate) tokens: usize,
}

impl Span {
    /// Whole rows.
    pub(crate) fn rows(batch: usize, tokens: usize) -> Vec<Self> {
        (0..batch).map(|row| Self { row, first: 0, tokens }).collect()
    }

    /// Documents that begin at `starts` among `batch` rows of `tokens` positions, and end where the next one begins; the last of `starts` is
    /// the end. Those without a position are left out.
    ///
    /// # Errors
    /// Starts that fall; documents that do not cover all positions, or cross a row's end.
    pub(crate) fn documents(starts: &[i32], batch: usize, tokens: usize) -> Result<Vec<Self>> {
        let refuse = |reason: String| Err(Error::invalid(NAME, reason));
        let covered = |end: &i32| usize::try_from(*end).is_ok_and(|end| end == batch * tokens);
        if starts.first() != Some(&0) || !starts.last().is_some_and(covered) {
            return refuse(format!(
                "documents that do not cover {batch} rows of {tokens} positions; expected starts from 0 to {}",
                batch * tokens
            ));
        }
        let mut spans = Vec::with_capacity(starts.len() - 1);
        for pair in starts.windows(2) {
            let (begin, end) = (pair[0] as usize, pair[1] as usize);
            if pair[1] < pair[0] || (begin < end && begin / tokens != (end - 1) / tokens) {
                return refuse(format!(
                    "a document from {} to {} in rows of {tokens} positions",
                    pair[0], pair[1]
                ));
            }
            if begin < end {
                spans.push(Self { row: begin / tokens, first: begin % tokens, tokens: end - begin });
            }
        }
        Ok(spans)
    }
}

/// Addresses and sizes of a pass over some positions of each row.
#[derive(Clone, Copy)]
struct Pass {
    tokens: usize,
    /// Positions of a row.
    row: usize,
    head: usize,
    /// Query heads of a head of keys.
    group: usize,
    heads: usize,
    scale: f64,
    /// Keys that a query sees, its own included.
    window: usize,
    /// c of c·tanh(s/c).
    cap: Option<f64>,
    q: Heads,
    k: Heads,
    v: Heads,
    o: Heads,
    /// `[batch, heads, row]` of the compute type, contiguous.
    log_sums: usize,
    /// `[heads]` of the compute type.
    sinks: Option<usize>,
}

impl Pass {
    /// The pass over a span alone.
    fn of<X: Element>(&self, span: Span) -> Self {
        let from = |heads: Heads| heads.starting_at::<X>(span.first);
        Self {
            tokens: span.tokens,
            q: from(self.q),
            k: from(self.k),
            v: from(self.v),
            o: from(self.o),
            log_sums: self.log_sums + span.first * size_of::<X::Compute>(),
            ..*self
        }
    }

    /// Returns the first key of the first block that a query sees.
    fn first_key(&self, query: usize) -> usize {
        (query + 1).saturating_sub(self.window) / BLOCK * BLOCK
    }

    /// Returns the end of the queries that see a key.
    fn end_of_queries(&self, key: usize) -> usize {
        key.saturating_add(self.window).min(self.tokens)
    }

    /// Returns the sink of a head.
    ///
    /// # Safety
    /// The tensor of sinks is of this type, and nothing writes it.
    unsafe fn sink<R: Copy>(&self, head: usize) -> Option<R> {
        // SAFETY: by this function's contract.
        self.sinks.map(|sinks| unsafe { *(sinks as *const R).add(head) })
    }

    /// Returns the log-sum-exp of a block of queries.
    ///
    /// # Safety
    /// The tensor is of this type, and nothing else uses these elements meanwhile, or nothing writes them.
    unsafe fn log_sums<'a, R>(&self, batch: usize, head: usize, first: usize, count: usize) -> &'a mut [R] {
        let at = (batch * self.heads + head) * self.row + first;
        // SAFETY: by this function's contract.
        unsafe { std::slice::from_raw_parts_mut((self.log_sums as *mut R).add(at), count) }
    }
}

/// The tensors of attention: q, o `[batch, heads, tokens, head]`, k, v `[batch, kv_heads, tokens, head]`, of one dtype.
pub(crate) struct Tensors<'a> {
    /// The width of the heads, if all are `[batch, tokens, heads·head]`.
    pub(crate) joint: Option<i64>,
    pub(crate) q: &'a Tensor,
    pub(crate) k: &'a Tensor,
    pub(crate) v: &'a Tensor,
    pub(crate) o: &'a Tensor,
    /// `[batch, heads, tokens]`, contiguous, of the dtype that is computed in.
    pub(crate) log_sums: &'a Tensor,
    /// `[heads]`, contiguous, of the dtype that is computed in.
    pub(crate) sinks: Option<&'a Tensor>,
}

/// How scores are computed from products.
#[derive(Clone, Copy)]
pub(crate) struct Scores {
    pub(crate) scale: f64,
    /// Keys that a query sees, its own included; all before it if absent.
    pub(crate) window: Option<usize>,
    /// c of c·tanh(s/c).
    pub(crate) cap: Option<f64>,
}

/// Returns the dtype that elements of `kind` are computed in; `None` for one that the passes do not take.
pub(crate) fn compute_kind(kind: Kind) -> Option<Kind> {
    match kind {
        Kind::Float | Kind::BFloat16 | Kind::Half => Some(Kind::Float),
        Kind::Double => Some(Kind::Double),
        _ => None,
    }
}

/// Computes `o` and `log_sums` within each of `spans`, which cover all positions; both are new: nothing else has seen them.
///
/// # Errors
/// Shapes, dtypes or strides that do not fit.
pub(crate) fn forward(tensors: &Tensors<'_>, scores: Scores, spans: &[Span]) -> Result<()> {
    let mut operands = Operands::new(NAME, Device::Cpu);
    let Checked { pass, kind, is_empty, .. } = check(&mut operands, tensors, scores, spans, Access::Write)?;
    operands.check()?;
    if is_empty {
        return Ok(());
    }
    let run = match kind {
        Kind::Double => forward_of::<f64>,
        Kind::BFloat16 => forward_of::<bf16>,
        Kind::Half => forward_of::<f16>,
        _ => forward_of::<f32>,
    };
    run(&pass, spans)
}

fn forward_of<X: Element>(pass: &Pass, spans: &[Span]) -> Result<()> {
    let blocks = blocks_of(spans);
    workers(blocks.len() * pass.heads, |_, next| {
        let mut scratch = forward::scratch::<X>(pass.head);
        while let Some(unit) = next() {
            let (span, first) = blocks[unit / pass.heads];
            simd::arch().dispatch(forward::Block::<X> {
                pass: &pass.of::<X>(span),
                batch: span.row,
                head: unit % pass.heads,
                first,
                scratch: &mut scratch,
                element: PhantomData,
            });
        }
    })
}

/// The blocks of queries of all spans, each with its first query. Those that see most keys come first, so that no worker begins one when
/// the others are done.
fn blocks_of(spans: &[Span]) -> Vec<(Span, usize)> {
    let of_span =
        |span: &Span| (0..span.tokens).step_by(BLOCK).map(|first| (*span, first)).collect::<Vec<_>>();
    let mut blocks: Vec<_> = spans.iter().flat_map(of_span).collect();
    blocks.sort_by_key(|(_, first)| std::cmp::Reverse(*first));
    blocks
}

/// Computes the gradients `[q, k, v]`, new tensors of the shapes of q, k and v, from that of the output, and that of the sinks, a new tensor
/// like them.
///
/// # Errors
/// As [`forward`].
pub(crate) fn backward(
    tensors: &Tensors<'_>,
    upstream: &Tensor,
    gradients: [&Tensor; 3],
    of_sinks: Option<&Tensor>,
    scores: Scores,
    spans: &[Span],
) -> Result<()> {
    let mut operands = Operands::new(NAME, Device::Cpu);
    let Checked { pass, batch, kv_heads, kind, is_empty } =
        check(&mut operands, tensors, scores, spans, Access::Read)?;
    let [batches, heads, tokens, head] = [batch, pass.heads, pass.tokens, pass.head].map(|size| size as i64);
    let mut add = |access, name, tensor: &Tensor, heads: i64| {
        let size = shape(tensors.joint, [batches, heads, tokens, head]);
        Heads::new(&mut operands, access, name, tensor, kind, &size, tensors.joint)
    };
    let heads_of_gradients = Gradients {
        o: add(Access::Read, "upstream", upstream, heads)?,
        q: add(Access::Write, "gradient of q", gradients[0], heads)?,
        k: add(Access::Write, "gradient of k", gradients[1], kv_heads)?,
        v: add(Access::Write, "gradient of v", gradients[2], kv_heads)?,
    };
    let computed = compute_kind(kind).unwrap_or(Kind::Float);
    let sinks_at = of_sinks.map(|of_sinks| {
        operands.contiguous(Access::Write, "gradient of sinks", of_sinks, computed, &[heads][..])
    });
    let sinks_at = sinks_at.transpose()?;
    operands.check()?;
    if is_empty {
        // No query sees the keys, if there are any.
        gradients
            .into_iter()
            .chain(of_sinks)
            .try_for_each(|gradient| gradient.shallow_clone().f_zero_().map(drop))?;
        return Ok(());
    }
    let run = match kind {
        Kind::Double => backward_of::<f64>,
        Kind::BFloat16 => backward_of::<bf16>,
        Kind::Half => backward_of::<f16>,
        _ => backward_of::<f32>,
    };
    run(&pass, heads_of_gradients, spans)?;
    let Some(at) = sinks_at else { return Ok(()) };
    let run = match kind {
        Kind::Double => sink::gradient::<f64>,
        Kind::BFloat16 => sink::gradient::<bf16>,
        Kind::Half => sink::gradient::<f16>,
        _ => sink::gradient::<f32>,
    };
    run(&pass, heads_of_gradients.o, batch, at)
}

fn backward_of<X: Element>(pass: &Pass, gradients: Gradients, spans: &[Span]) -> Result<()> {
    let mut spans = spans.to_vec();
    spans.sort_by_key(|span| std::cmp::Reverse(span.tokens));
    let longest = spans.first().map_or(0, |span| span.tokens);
    let worker_sums = backward::sums::<X>(longest, pass.head);
    let workers_at_most = threads();
    // Of the allocator that counts, because it grows with the rows.
    let elements = (worker_sums * workers_at_most) as i64;
    let sums =
        (elements > 0).then(|| Tensor::f_empty([elements], (X::Compute::KIND, Device::Cpu))).transpose()?;
    let sums_at = sums.as_ref().map_or(0, |sums| sums.data_ptr() as usize);
    let kv_heads = pass.heads / pass.group;
    let run =
        |units: usize, unit_work: &(dyn Fn(usize) -> (Span, usize, std::ops::Range<usize>, Parts) + Sync)| {
            workers(units, |worker, next| {
                let mut scratch = backward::scratch::<X>(pass.head);
                while let Some(unit) = next() {
                    let (span, head, keys, parts) = unit_work(unit);
                    simd::arch().dispatch(Keys::<X> {
                        pass: &pass.of::<X>(span),
                        gradients: gradients.starting_at::<X>(span.first),
                        batch: span.row,
                        head,
                        keys,
                        parts,
                        scratch: &mut scratch,
                        sums: (sums_at as *mut X::Compute).wrapping_add(worker * worker_sums),
                        element: PhantomData,
                    });
                }
            })
        };
    // Blocks as units take seven products where heads of spans take five.
    let [pairs, slowest] = pairs_of_workers(&spans, kv_heads, workers_at_most);
    if 5 * slowest * workers_at_most as u128 <= 7 * pairs {
        return run(spans.len() * kv_heads, &|unit| {
            let span = spans[unit / kv_heads];
            (span, unit % kv_heads, 0..span.tokens, Parts::All)
        });
    }
    // More units, which compute the scores twice; the sums are the same.
    let mut blocks = blocks_of(&spans);
    run(blocks.len() * pass.heads, &|unit| {
        let ((span, first), head) = (blocks[unit / pass.heads], unit % pass.heads);
        (span, head / pass.group, 0..span.tokens, Parts::Queries { head, first })
    })?;
    // The first keys are seen by the most queries.
    blocks.sort_by_key(|(span, first)| std::cmp::Reverse(span.tokens - first));
    run(blocks.len() * kv_heads, &|unit| {
        let (span, first) = blocks[unit / kv_heads];
        (span, unit % kv_heads, first..(first + BLOCK).min(span.tokens), Parts::KeysAndValues)
    })
}

/// The pairs of queries and keys of all heads of keys of spans, by falling length, and those of the worker that has most of them if each takes
/// the next head of a span when it is done.
fn pairs_of_workers(spans: &[Span], kv_heads: usize, workers: usize) -> [u128; 2] {
    let (mut all, mut loads) = (0, vec![0u128; workers.max(1)]);
    for span in spans {
        let pairs = (span.tokens as u128).pow(2);
        for _ in 0..kv_heads {
            all += pairs;
            if let Some(least) = loads.iter_mut().min() {
                *least += pairs;
            }
        }
    }
    [all, loads.into_iter().max().unwrap_or(0)]
}

fn threads() -> usize {
    usize::try_from(tch::get_num_threads()).unwrap_or(1).max(1)
}

/// Runs `work(worker, next)` on as many threads as there are, or units; `next` returns the next unit.
fn workers(units: usize, work: impl Fn(usize, &mut dyn FnMut() -> Option<usize>) + Sync) -> Result<()> {
    let next = AtomicUsize::new(0);
    parallel::for_each(threads().min(units), |worker| {
        work(worker, &mut || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|unit| *unit < units));
    })
}

/// Returns batch, heads, tokens and head of the shape of q.
pub(crate) fn dimensions(size: &[i64], joint: Option<i64>) -> Result<[i64; 4]> {
    match (size, joint) {
        (&[batch, heads, tokens, head], None) => Ok([batch, heads, tokens, head]),
        (&[batch, tokens, width], Some(head)) if head > 0 && width % head == 0 => {
            Ok([batch, width / head, tokens, head])
        }
        (_, None) => {
            Err(Error::invalid(NAME, format!("q is {size:?}; expected [batch, heads, tokens, head]")))
        }
        (_, Some(head)) => {
            let reason = format!("q is {size:?}; expected [batch, tokens, heads·head] with heads of {head}");
            Err(Error::invalid(NAME, reason))
        }
    }
}

/// Returns the shape of such a tensor.
fn shape(joint: Option<i64>, [batch, heads, tokens, head]: [i64; 4]) -> SmallVec<[i64; 4]> {
    match joint {
        None => SmallVec::from_buf([batch, heads, tokens, head]),
        Some(_) => SmallVec::from_slice(&[batch, tokens, heads * head]),
    }
}

/// The checked tensors of a pass.
struct Checked {
    pass: Pass,
    batch: usize,
    kv_heads: i64,
    kind: Kind,
    /// Whether the output has no element.
    is_empty: bool,
}

/// Checks the tensors of a pass over `spans`, and gives the addresses and sizes of whole rows. The results are written in a forward.
fn check(
    operands: &mut Operands,
    tensors: &Tensors<'_>,
    scores: Scores,
    spans: &[Span],
    results: Access,
) -> Result<Checked> {
    let &Tensors { joint, q, k, v, o, log_sums, sinks } = tensors;
    let (of_q, of_k) = (TensorLayout::of(q)?, TensorLayout::of(k)?);
    let (kind, size) = (of_q.kind(), of_q.size());
    let [batch, heads, tokens, head] = dimensions(size, joint)?;
    let kv_heads = match joint {
        None => of_k.size().get(1).copied().unwrap_or(0),
        Some(head) => of_k.size().get(2).copied().unwrap_or(0) / head,
    };
    let divides = if kv_heads > 0 { heads % kv_heads == 0 } else { heads == 0 };
    let Some(computed) = compute_kind(kind).filter(|_| divides) else {
        let reason = format!(
            "q is {kind:?} {size:?}, k {:?}; expected a floating dtype, and a multiple of k's heads for q",
            of_k.size()
        );
        return Err(Error::invalid(NAME, reason));
    };
    let size_of_keys = shape(joint, [batch, kv_heads, tokens, head]);
    let covered: usize = spans.iter().map(|span| span.tokens).sum();
    let inside = |span: &Span| span.row < batch as usize && span.first + span.tokens <= tokens as usize;
    if !spans.iter().all(inside) || covered != (batch * tokens) as usize {
        let reason = format!("documents of {covered} positions over {batch} rows of {tokens}");
        return Err(Error::invalid(NAME, reason));
    }
    let pass = Pass {
        tokens: tokens as usize,
        row: tokens as usize,
        head: head as usize,
        group: (heads / kv_heads.max(1)) as usize,
        heads: heads as usize,
        scale: scores.scale,
        window: scores.window.unwrap_or(usize::MAX),
        cap: scores.cap,
        q: Heads::new(operands, Access::Read, "q", q, kind, size, joint)?,
        k: Heads::new(operands, Access::Read, "k", k, kind, &size_of_keys, joint)?,
        v: Heads::new(operands, Access::Read, "v", v, kind, &size_of_keys, joint)?,
        o: Heads::new(operands, results, "o", o, kind, size, joint)?,
        log_sums: operands.contiguous(
            results,
            "log_sums",
            log_sums,
            computed,
            &[batch, heads, tokens][..],
        )?,
        sinks: sinks
            .map(|sinks| operands.contiguous(Access::Read, "sinks", sinks, computed, &[heads][..]))
            .transpose()?,
    };
    Ok(Checked { pass, batch: batch as usize, kv_heads, kind, is_empty: of_q.numel() == 0 })
}
