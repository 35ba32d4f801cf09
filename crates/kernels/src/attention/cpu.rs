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

/// Addresses and sizes of a pass.
#[derive(Clone, Copy)]
struct Pass {
    tokens: usize,
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
    /// `[batch, heads, tokens]` of the compute type, contiguous.
    log_sums: usize,
    /// `[heads]` of the compute type.
    sinks: Option<usize>,
}

impl Pass {
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
        let at = (batch * self.heads + head) * self.tokens + first;
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

/// Computes `o` and `log_sums`, which are new: nothing else has seen them.
///
/// # Errors
/// Shapes, dtypes or strides that do not fit.
pub(crate) fn forward(tensors: &Tensors<'_>, scores: Scores) -> Result<()> {
    let mut operands = Operands::new(NAME, Device::Cpu);
    let Checked { pass, batch, kind, is_empty, .. } = check(&mut operands, tensors, scores, Access::Write)?;
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
    run(&pass, batch)
}

fn forward_of<X: Element>(pass: &Pass, batch: usize) -> Result<()> {
    let blocks = pass.tokens.div_ceil(BLOCK);
    let units = batch * pass.heads * blocks;
    workers(units, |_, next| {
        let mut scratch = forward::scratch::<X>(pass.head);
        while let Some(unit) = next() {
            // The longest come first, so that no worker begins one when the others are done.
            let (block, unit) = (blocks - 1 - unit / (batch * pass.heads), unit % (batch * pass.heads));
            simd::arch().dispatch(forward::Block::<X> {
                pass,
                batch: unit / pass.heads,
                head: unit % pass.heads,
                first: block * BLOCK,
                scratch: &mut scratch,
                element: PhantomData,
            });
        }
    })
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
) -> Result<()> {
    let mut operands = Operands::new(NAME, Device::Cpu);
    let Checked { pass, batch, kv_heads, kind, is_empty } =
        check(&mut operands, tensors, scores, Access::Read)?;
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
    run(&pass, heads_of_gradients, batch)?;
    let Some(at) = sinks_at else { return Ok(()) };
    let run = match kind {
        Kind::Double => sink::gradient::<f64>,
        Kind::BFloat16 => sink::gradient::<bf16>,
        Kind::Half => sink::gradient::<f16>,
        _ => sink::gradient::<f32>,
    };
    run(&pass, heads_of_gradients.o, batch, at)
}

fn backward_of<X: Element>(pass: &Pass, gradients: Gradients, batch: usize) -> Result<()> {
    let worker_sums = backward::sums::<X>(pass.tokens, pass.head);
    let workers_at_most = threads();
    // Of the allocator that counts, because it grows with the rows.
    let elements = (worker_sums * workers_at_most) as i64;
    let sums =
        (elements > 0).then(|| Tensor::f_empty([elements], (X::Compute::KIND, Device::Cpu))).transpose()?;
    let sums_at = sums.as_ref().map_or(0, |sums| sums.data_ptr() as usize);
    let kv_heads = pass.heads / pass.group;
    let blocks = pass.tokens.div_ceil(BLOCK);
    let run =
        |units: usize,
         unit_work: &(dyn Fn(usize) -> (usize, usize, std::ops::Range<usize>, Parts) + Sync)| {
            workers(units, |worker, next| {
                let mut scratch = backward::scratch::<X>(pass.head);
                while let Some(unit) = next() {
                    let (batch, head, keys, parts) = unit_work(unit);
                    simd::arch().dispatch(Keys::<X> {
                        pass,
                        gradients,
                        batch,
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
    // Blocks as units take seven products where heads take five.
    let units = batch * kv_heads;
    let idle = units.next_multiple_of(workers_at_most) - units;
    if 5 * (units + idle) <= 7 * units {
        return run(batch * kv_heads, &|unit| (unit / kv_heads, unit % kv_heads, 0..pass.tokens, Parts::All));
    }
    // More units, which compute the scores twice; the sums are the same.
    run(batch * pass.heads * blocks, &|unit| {
        let (block, unit) = (blocks - 1 - unit / (batch * pass.heads), unit % (batch * pass.heads));
        let (batch, head) = (unit / pass.heads, unit % pass.heads);
        let parts = Parts::Queries { head, first: block * BLOCK };
        (batch, head / pass.group, 0..pass.tokens, parts)
    })?;
    run(batch * kv_heads * blocks, &|unit| {
        let (block, unit) = (unit / (batch * kv_heads), unit % (batch * kv_heads));
        let keys = block * BLOCK..((block + 1) * BLOCK).min(pass.tokens);
        (unit / kv_heads, unit % kv_heads, keys, Parts::KeysAndValues)
    })
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

/// Checks the tensors of a pass, and gives its addresses and sizes. The results are written in a forward.
fn check(operands: &mut Operands, tensors: &Tensors<'_>, scores: Scores, results: Access) -> Result<Checked> {
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
    let pass = Pass {
        tokens: tokens as usize,
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
