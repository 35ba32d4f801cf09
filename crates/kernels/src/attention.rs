//! Causal attention on the CPU without the matrix of its weights, forward and backward.
//!
//! For the queries, keys and values of one head of width e, with scores s_ij = c·q_i·k_j for j ≤ i:
//!
//! - p_ij = exp(s_ij − L_i) with L_i = ln Σ_j exp(s_ij), o_i = Σ_j p_ij·v_j
//! - backward, from g_i, the gradient of o_i, with d_i = g_i·o_i: the gradient of s_ij is z_ij = p_ij·(g_i·v_j − d_i), and those of q_i, k_j
//!   and v_j are c·Σ_j z_ij·k_j, c·Σ_i z_ij·q_i and Σ_i p_ij·g_i
//!
//! With a window w, scores exist for i − w < j ≤ i: blocks without one are skipped. With a cap c, s is replaced by s' = c·tanh(s/c), and the
//! gradient of s is z times 1 − (s'/c)².
//!
//! With a sink a of the head (gpt-oss), one more score a has no value: L_i = ln(e^a + Σ_j exp(s_ij)), so the weights of a query sum to less than
//! 1. The gradients of q, k and v are as above with this L and this o; that of a is −Σ_i exp(a − L_i)·d_i.
//!
//! As in FlashAttention-2 (Dao, arXiv:2307.08691), blocks of scores are computed while they are in the cache, with a running maximum and
//! sum for each query; backward computes them again. Kept are q, k, v, o and one number L for each query and head. fp32, bf16 and fp16 are
//! computed in fp32 and rounded once, f64 in f64.
//!
//! libtorch's kernel for the CPU has MKL multiply blocks, whose calls take as long as the work of small heads: its scores of heads of 64 run at
//! a quarter of the rate of large products. Here a head of keys is one thread's work from the first block to the last, all products are
//! this module's, and of blocks on the diagonal only the visible half is multiplied.
//!
//! [`single_query_attention`] is the step of generation: one query of each head over all keys. Each key is read once for the queries
//! that share it.
//!
//! Results do not depend on the number of threads: sums have the same order however the work is divided.

pub mod backend;
mod cpu;
mod scaled_dot_product;

use crate::processor::computes_on;
use runtime::autograd::retain::kept;
use runtime::autograd::{self, Backward, Forward, Function, GradMode};
use runtime::profile::{Flops, is_counting, kernel, record_external};
use runtime::tensor_layout::TensorLayout;
use runtime::tensor_memory::Dense;
use runtime::{Error, Result};
pub use scaled_dot_product::{ScaledDotProductOptions, scaled_dot_product, takes_groups};
use tch::{Device, Kind, Tensor};

use crate::operands::has_dense_heads;
use cpu::{NAME, Scores, Single, Span, Tensors, compute_kind};

/// Returns whether [`causal_attention`] takes tensors of this device and dtype.
pub fn takes(device: Device, kind: Kind) -> bool {
    computes_on(device) && compute_kind(kind).is_some()
}

/// Options of [`causal_attention`].
#[derive(Debug, Clone, Copy, Default)]
pub struct CausalOptions<'a> {
    /// Factor of the scores; 1/√head if absent.
    pub scale: Option<f64>,
    /// Number of tokens that a query attends to, itself included; all before it if absent.
    pub window: Option<i64>,
    /// c of c·tanh(s/c), which replaces a score s.
    pub cap: Option<f64>,
    /// The sink of each head, `[heads]` of any floating dtype, neither scaled nor capped; gets a gradient.
    pub sinks: Option<&'a Tensor>,
    /// Where documents begin among the batch·tokens positions, and the end of the last one (`cu_seqlens`): a query attends to keys of its
    /// document alone. A document is part of one row, and the documents cover all rows. `None` if each row is one.
    pub documents: Option<&'a [i32]>,
}

/// Computes causal attention of q `[batch, heads, tokens, head]` over k and v `[batch, kv_heads, tokens, head]`, of one dtype, and returns the
/// shape of q; the heads of k and v are each shared by a group of query heads. The last dimension should be dense; the memory of the
/// result is that of `[batch, tokens, heads, head]`.
///
/// In a segment that keeps its products ([`retain`](runtime::autograd::retain)), the result and L are kept.
///
/// # Errors
/// Shapes that do not match; a device or dtype that it does not take ([`takes`]); a window below 1; a cap that is not positive; documents
/// that do not cover the rows, or cross one's end. Without elements the result is empty.
///
/// ```
/// use kernels::attention::{CausalOptions, causal_attention};
/// use tch::{Tensor, kind};
///
/// let x = Tensor::randn([2, 4, 100, 16], kind::FLOAT_CPU).set_requires_grad(true);
/// let o = causal_attention(&x, &x, &x, CausalOptions::default())?;
/// let expected = Tensor::scaled_dot_product_attention(&x, &x, &x, None::<&Tensor>, 0.0, true, None, false);
/// assert!((o - expected).abs().max().double_value(&[]) < 1e-5);
/// # Ok::<(), runtime::Error>(())
/// ```
pub fn causal_attention(q: &Tensor, k: &Tensor, v: &Tensor, options: CausalOptions<'_>) -> Result<Tensor> {
    let head = TensorLayout::of(q)?.size().last().copied().unwrap_or(1);
    apply([q, k, v], (None, head), options)
}

/// Computes [`causal_attention`] of q `[batch, tokens, heads·head]` over k and v `[batch, tokens, kv_heads·head]`, as projections return
/// them, and returns the shape of q: the same numbers, without a view for each tensor in the graph.
///
/// # Errors
/// As [`causal_attention`]; a width that `head` does not divide.
pub fn causal_attention_of_rows(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    head: i64,
    options: CausalOptions<'_>,
) -> Result<Tensor> {
    apply([q, k, v], (Some(head), head), options)
}

fn apply(
    [q, k, v]: [&Tensor; 3],
    (joint, head): (Option<i64>, i64),
    options: CausalOptions<'_>,
) -> Result<Tensor> {
    let CausalOptions { scale, window, cap, sinks, documents } = options;
    check_options(window, cap)?;
    let scale = scale.unwrap_or_else(|| 1.0 / (head as f64).sqrt());
    let scores = Scores { scale, window: window.map(|window| window as usize), cap };
    let [batch, _, tokens, _] =
        cpu::dimensions(TensorLayout::of(q)?.size(), joint)?.map(|size| size as usize);
    let spans = match documents {
        None => Span::rows(batch, tokens),
        Some(starts) => Span::documents(starts, batch, tokens)?,
    };
    let function = Causal { scores, joint, spans };
    let [y] = match sinks {
        Some(sinks) => autograd::apply(function, &[q, k, v, sinks])?,
        None => autograd::apply(function, &[q, k, v])?,
    };
    Ok(y)
}

fn check_options(window: Option<i64>, cap: Option<f64>) -> Result<()> {
    if let Some(window) = window.filter(|window| *window < 1) {
        return Err(Error::invalid(NAME, format!("the window is {window} tokens; expected at least 1")));
    }
    if let Some(cap) = cap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
        return Err(Error::invalid(NAME, format!("the cap is {cap}; expected a finite number above 0")));
    }
    Ok(())
}

/// Options of [`single_query_attention`].
#[derive(Debug, Clone, Copy, Default)]
pub struct SingleQueryOptions<'a> {
    /// `[batch, keys]` or `[1, keys]`, bool: which keys are seen, in each row at least one; all if absent.
    pub mask: Option<&'a Tensor>,
    /// Factor of the scores; 1/√head if absent.
    pub scale: Option<f64>,
    /// c of c·tanh(s/c), which replaces a score s.
    pub cap: Option<f64>,
    /// The sink of each head, `[heads]` of any floating dtype.
    pub sinks: Option<&'a Tensor>,
}

/// Computes attention of one query of each head, q `[batch, heads, head]`, over all of k and v `[batch, kv_heads, keys, head]`, the step of
/// generation, and returns the shape of q. No gradients. The last dimension of k and v should be dense.
///
/// # Errors
/// Shapes that do not match; a device or dtype that it does not take ([`takes`]); operands that require a gradient while gradients are
/// recorded.
///
/// ```
/// use kernels::attention::{SingleQueryOptions, single_query_attention};
/// use tch::{Tensor, kind};
///
/// let (q, k) = (Tensor::randn([2, 4, 16], kind::FLOAT_CPU), Tensor::randn([2, 2, 100, 16], kind::FLOAT_CPU));
/// let o = single_query_attention(&q, &k, &k, SingleQueryOptions::default())?;
/// let grouped = q.view([2, 2, 2, 16]);
/// let expected = Tensor::scaled_dot_product_attention(&grouped, &k, &k, None::<&Tensor>, 0.0, false, None, false);
/// assert!((o - expected.view([2, 4, 16])).abs().max().double_value(&[]) < 1e-5);
/// # Ok::<(), runtime::Error>(())
/// ```
pub fn single_query_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: SingleQueryOptions<'_>,
) -> Result<Tensor> {
    if GradMode::enabled() && [q, k, v].into_iter().any(Tensor::requires_grad) {
        let reason = "an operand of a single query's attention requires a gradient, which is not recorded";
        return Err(Error::invalid(NAME, reason));
    }
    let (batch, heads, head) = q.size3()?;
    let keys = k.size().get(2).copied().unwrap_or(0);
    let mask = options.mask.map(|mask| {
        let mask = mask.f_expand([batch, keys], false)?;
        if keys < 2 || mask.stride()[1] == 1 { Ok(mask) } else { mask.f_contiguous() }
    });
    let mask = mask.transpose()?;
    let [q, k, v] = [readable(q)?, readable(k)?, readable(v)?];
    let o = Tensor::f_empty([batch, heads, head], (q.kind(), q.device()))?;
    let scale = options.scale.unwrap_or_else(|| 1.0 / (head as f64).sqrt());
    let sinks = options.sinks.map(|sinks| computed(sinks, q.kind())).transpose()?;
    {
        let _scope = kernel(SINGLE, [&q, &k, &v]);
        let tensors = Single { q: &q, k: &k, v: &v, o: &o, mask: mask.as_ref(), sinks: sinks.as_ref() };
        cpu::single(&tensors, scale, options.cap)?;
    }
    let flops = (4 * batch * heads * keys * head).unsigned_abs();
    let bytes: usize = [&*q, &*k, &*v, &o].iter().map(|x| x.numel() * x.kind().elt_size_in_bytes()).sum();
    record_external(SINGLE, Flops::from(flops), bytes as u64)?;
    Ok(o)
}

struct Causal {
    scores: Scores,
    /// The width of the heads, if the tensors are `[batch, tokens, heads·head]`.
    joint: Option<i64>,
    /// Rows, or documents.
    spans: Vec<Span>,
}

impl Causal {
    /// Returns a tensor like this one, for the result or a gradient.
    fn empty_like(&self, like: &TensorLayout) -> Result<Tensor> {
        match self.joint {
            None => heads_last(like),
            Some(_) => Ok(Tensor::f_empty(like.size(), (like.kind(), like.device()))?),
        }
    }

    /// Records the FLOPs of `products` products for each pair of a query and a key, of `width` numbers in all heads, and the bytes that are
    /// read and written.
    fn record(&self, name: &str, width: i64, products: u64, moved: &[&Tensor]) -> Result<()> {
        if !is_counting() {
            return Ok(());
        }
        let (mut all, mut visible) = (0, 0);
        for tokens in self.spans.iter().map(|span| span.tokens as u64) {
            let seen = self.scores.window.map_or(tokens, |window| tokens.min(window as u64));
            all += tokens * seen;
            visible += seen * (seen + 1) / 2 + (tokens - seen) * seen;
        }
        let flops = |pairs: u64| 2 * products * width.unsigned_abs() * pairs;
        let bytes = moved.iter().map(|x| x.numel() * x.kind().elt_size_in_bytes()).sum::<usize>();
        record_external(name, Flops { dense: flops(all), causal: flops(visible) }, bytes as u64)
    }
}

impl Function for Causal {
    fn name(&self) -> &'static str {
        "fused causal attention"
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (&[q, k, v], given) = inputs.split_first_chunk::<3>().ok_or_else(lost)?;
        let given = given.first().copied();
        let readable = [readable(q)?, readable(k)?, readable(v)?];
        let [q, k, v] = readable.each_ref().map(|x| &**x);
        let results = kept(|| {
            let layout = TensorLayout::of(q)?;
            let [batch, heads, tokens, head] = cpu::dimensions(layout.size(), self.joint)?;
            let o = self.empty_like(&layout)?;
            let wide = compute_kind(layout.kind()).unwrap_or(Kind::Float);
            let log_sums = Tensor::f_empty([batch, heads, tokens], (wide, layout.device()))?;
            let sinks = given.map(|sinks| computed(sinks, layout.kind())).transpose()?;
            {
                let _scope = kernel(FORWARD, [q, k, v]);
                let sinks = sinks.as_ref();
                let tensors = Tensors { joint: self.joint, q, k, v, o: &o, log_sums: &log_sums, sinks };
                cpu::forward(&tensors, self.scores, &self.spans)?;
            }
            let moved = [q, k, v, &o, &log_sums];
            self.record(FORWARD, heads * head, 2, &moved)?;
            Ok(vec![o, log_sums])
        })?;
        let [o, log_sums] = <[Tensor; 2]>::try_from(results)
            .map_err(|_| Error::invalid(NAME, "the retained tensors are not an attention's result"))?;
        for tensor in [q, k, v, &o, &log_sums].into_iter().chain(given) {
            ctx.save(tensor);
        }
        Ok(vec![o])
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let saved = ctx.take_saved();
        let ([q, k, v, o, log_sums], given) = saved.split_first_chunk::<5>().ok_or_else(lost)?;
        let given = given.first();
        let Some(upstream) = grads.into_iter().next().flatten() else {
            return Ok([None, None, None].into_iter().chain(given.map(|_| None)).collect());
        };
        let upstream = readable(&upstream)?;
        let upstream = &*upstream;
        let layouts = [TensorLayout::of(q)?, TensorLayout::of(k)?, TensorLayout::of(v)?];
        let [of_q, of_k, of_v] = &layouts;
        let gradients = [self.empty_like(of_q)?, self.empty_like(of_k)?, self.empty_like(of_v)?];
        let [q_gradient, k_gradient, v_gradient] = &gradients;
        let sinks = given.map(|sinks| computed(sinks, of_q.kind())).transpose()?;
        let of_sinks = sinks.as_ref().filter(|_| ctx.needs_input_grad(3));
        let of_sinks = of_sinks.map(Tensor::f_empty_like).transpose()?;
        {
            let _scope = kernel(BACKWARD, [q, k, v]);
            let tensors = Tensors { joint: self.joint, q, k, v, o, log_sums, sinks: sinks.as_ref() };
            let gradients = [q_gradient, k_gradient, v_gradient];
            cpu::backward(&tensors, upstream, gradients, of_sinks.as_ref(), self.scores, &self.spans)?;
        }
        let [_, heads, _, head] = cpu::dimensions(layouts[0].size(), self.joint)?;
        self.record(
            BACKWARD,
            heads * head,
            5,
            &[q, k, v, o, upstream, log_sums, q_gradient, k_gradient, v_gradient],
        )?;
        let of_sinks =
            given.map(|sinks| of_sinks.map(|of_sinks| of_sinks.f_to_kind(sinks.kind())).transpose());
        let of_sinks = of_sinks.transpose()?;
        Ok(gradients.into_iter().map(Some).chain(of_sinks).collect())
    }
}

fn lost() -> Error {
    Error::invalid(NAME, "the operands of attention are gone")
}

/// Returns sinks in the dtype that elements of `kind` are computed in.
fn computed(sinks: &Tensor, kind: Kind) -> Result<Tensor> {
    Ok(sinks.f_detach()?.f_to_kind(compute_kind(kind).unwrap_or(Kind::Float))?.f_contiguous()?)
}

const FORWARD: &str = "runtime::causal_attention";
const BACKWARD: &str = "runtime::causal_attention_backward";
const SINGLE: &str = "runtime::single_query_attention";

/// Returns the tensor, or a copy that the passes can read.
fn readable(x: &Tensor) -> Result<Dense<'_>> {
    let layout = TensorLayout::of(x)?;
    if has_dense_heads(&layout) && !layout.is_neg() {
        return Ok(Dense::Same(x));
    }
    let x = x.f_resolve_neg()?;
    Ok(Dense::Copy(if has_dense_heads(&layout) { x } else { x.f_contiguous()? }))
}

/// Returns a tensor of the shape and dtype of `[batch, heads, tokens, head]`, with the heads of a token side by side.
///
/// No view: libtorch refuses to change views that a function returns in place.
fn heads_last(like: &TensorLayout) -> Result<Tensor> {
    let &[batch, heads, tokens, head] = like.size() else {
        let reason = format!("a tensor of shape {:?}; expected [batch, heads, tokens, head]", like.size());
        return Err(Error::invalid(NAME, reason));
    };
    let strides = [tokens * heads * head, head, heads * head, 1];
    Ok(Tensor::f_empty_strided([batch, heads, tokens, head], strides, (like.kind(), like.device()))?)
}
