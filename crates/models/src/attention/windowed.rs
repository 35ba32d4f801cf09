//! Causal attention of one document, within a sliding window if the model has one: by a kernel on the CPU, else in chunks of queries.
//!
//! A chunk of c queries sees at most w − 1 + c keys with a window w, so the scores take t·(w − 1 + c) elements per head instead of t².

use kernels::attention::{self as fused, CausalOptions, ScaledDotProductOptions, scaled_dot_product};
use runtime::precision;
use runtime::tensor_layout::TensorLayout;
use tch::Tensor;

use super::explicit::{band, of_heads};
use super::{AttentionConfig, Documents, check_sizes, effective};
use crate::error::Result;

/// Bounds of the queries per chunk: with fewer the products are too small, with more they multiply many keys outside the window.
const CHUNK: [i64; 2] = [64, 512];

/// Returns the attention `[b, heads, t, head]` of `q` `[b, heads, t, head]` over `k` and `v` `[b, kv_heads, t, head]`, with one document per
/// row.
pub(crate) fn over_window(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: &AttentionConfig<'_>,
) -> runtime::Result<Tensor> {
    let of_q = TensorLayout::of(q)?;
    let sequence = of_q.size()[2];
    if has_kernel(&of_q, options) {
        return by_kernel(q, k, v, options, None);
    }
    let Some(window) = options.window.filter(|&window| window < sequence) else {
        return attend(q, k, v, None, options);
    };
    let chunk = (window / 2).clamp(CHUNK[0], CHUNK[1]);
    // The first `window` queries see every key before them, so they need no mask.
    let mut lengths = vec![window];
    let mut left = sequence - window;
    while left > 0 {
        lengths.push(left.min(chunk));
        left -= left.min(chunk);
    }
    // One split has one backward, which concatenates; narrow would add a full-size gradient for each chunk.
    let queries = q.f_split_with_sizes(&lengths, 2)?;
    let mask = band([chunk, window - 1 + chunk], window - 1, Some(window), q)?;
    // A row of the mask is a query of the chunk, and its columns are the keys from window − 1 before the chunk on.
    let (mut parts, mut start) = (Vec::with_capacity(queries.len()), 0);
    for (q, length) in queries.iter().zip(lengths) {
        let from = (start - (window - 1)).max(0);
        let keys = start + length - from;
        let (k, v) = (k.f_narrow(2, from, keys)?, v.f_narrow(2, from, keys)?);
        let mask = if start == 0 { None } else { Some(mask.f_narrow(0, 0, length)?.f_narrow(1, 0, keys)?) };
        parts.push(attend(q, &k, &v, mask.as_ref(), options)?);
        start += length;
    }
    Ok(Tensor::f_cat(&parts, 2)?)
}

/// Returns [`over_window`] by the kernel of [`has_kernel`], within each of the documents, if there are any.
pub(super) fn by_kernel(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: &AttentionConfig<'_>,
    documents: Option<&Documents>,
) -> runtime::Result<Tensor> {
    fused::causal_attention(q, k, v, of_kernel(options, documents))
}

fn of_kernel<'a>(options: &AttentionConfig<'a>, documents: Option<&'a Documents>) -> CausalOptions<'a> {
    let &AttentionConfig { scale, window, softcap: cap, sinks, .. } = options;
    CausalOptions { scale, window, cap, sinks, documents: documents.map(Documents::starts) }
}

/// Returns [`attention`](super::attention) of q `[b, t, heads·head]` over k and v `[b, t, kv_heads·head]` by the kernel of [`has_kernel`].
///
/// # Errors
/// As [`attention`](super::attention).
pub(crate) fn attention_of_rows(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    (head, documents): (i64, Option<&Documents>),
    options: &AttentionConfig<'_>,
) -> Result<Tensor> {
    let layouts = [TensorLayout::of(q)?, TensorLayout::of(k)?, TensorLayout::of(v)?];
    let by_heads = |layout: &TensorLayout| match layout.size() {
        &[batch, sequence, width] => vec![batch, sequence, width / head, head],
        other => other.to_vec(),
    };
    let sizes = layouts.each_ref().map(by_heads);
    let [_, sequence, ..] = check_sizes(sizes.each_ref().map(Vec::as_slice), options)?;
    let options = of_kernel(&effective(options, sequence, documents), documents);
    precision::attend(q, k, v, &|q, k, v| fused::causal_attention_of_rows(q, k, v, head, options))
}

/// Returns whether the kernel of `kernels` computes this attention. It supports windows, soft caps, sinks and grouped heads, but no dropout.
pub(crate) fn has_kernel(q: &TensorLayout, options: &AttentionConfig<'_>) -> bool {
    options.dropout == 0.0 && fused::takes(q.device(), q.kind())
}

/// Returns the attention over the keys that `mask` allows, or causal attention without a mask.
fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    options: &AttentionConfig<'_>,
) -> runtime::Result<Tensor> {
    let &AttentionConfig { dropout, scale, .. } = options;
    if options.is_plain() {
        return scaled_dot_product(q, k, v, ScaledDotProductOptions { mask, dropout, scale });
    }
    let visible = match mask {
        Some(mask) => mask.shallow_clone(),
        None => band([q.size()[2], k.size()[2]], 0, None, q)?,
    };
    of_heads(q, k, v, &visible, options)
}
