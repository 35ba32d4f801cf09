//! Attention within a sliding window: by a kernel on the CPU, else in chunks of queries.

use kernels::attention::{self as fused, CausalOptions};
use kernels::attention::{ScaledDotProductOptions, scaled_dot_product};
use tch::Tensor;

use super::AttentionConfig;
use super::explicit::{band, of_heads};

/// Bounds of the queries of a chunk: fewer make products too small, more read keys that no query attends to.
const CHUNK: [i64; 2] = [64, 512];

/// Attention of `q` `[b, heads, t, head]` over `k` and `v` `[b, kv_heads, t, head]`, one document, within the window if there is
/// one.
pub(crate) fn over_window(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: &AttentionConfig,
) -> runtime::Result<Tensor> {
    let sequence = q.size()[2];
    if has_kernel(q, options) {
        let &AttentionConfig { scale, window, softcap: cap, .. } = options;
        return fused::causal_attention(q, k, v, CausalOptions { scale, window, cap });
    }
    let Some(window) = options.window.filter(|&window| window < sequence) else {
        return of_chunk(q, k, v, None, options);
    };
    let chunk = (window / 2).clamp(CHUNK[0], CHUNK[1]);
    // The first queries see every key before them, so that they need no mask.
    let mut lengths = vec![window];
    let mut left = sequence - window;
    while left > 0 {
        lengths.push(left.min(chunk));
        left -= left.min(chunk);
    }
    // One split has one backward, which concatenates.
    let queries = q.f_split_with_sizes(&lengths, 2)?;
    let mask = band([chunk, window - 1 + chunk], window - 1, Some(window), q)?;
    let (mut parts, mut start) = (Vec::with_capacity(queries.len()), 0);
    for (q, length) in queries.iter().zip(lengths) {
        let from = (start - (window - 1)).max(0);
        let keys = start + length - from;
        let (k, v) = (k.f_narrow(2, from, keys)?, v.f_narrow(2, from, keys)?);
        let mask = if start == 0 { None } else { Some(mask.f_narrow(0, 0, length)?.f_narrow(1, 0, keys)?) };
        parts.push(of_chunk(q, &k, &v, mask.as_ref(), options)?);
        start += length;
    }
    Ok(Tensor::f_cat(&parts, 2)?)
}

/// Whether the kernel of this project computes it, with windows, caps and groups.
pub(crate) fn has_kernel(q: &Tensor, options: &AttentionConfig) -> bool {
    options.dropout == 0.0 && fused::takes(q.device(), q.kind())
}

/// Attention over the keys of a mask, or causal attention.
fn of_chunk(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    options: &AttentionConfig,
) -> runtime::Result<Tensor> {
    let &AttentionConfig { dropout, scale, softcap, .. } = options;
    if softcap.is_none() {
        return scaled_dot_product(q, k, v, ScaledDotProductOptions { mask, dropout, scale });
    }
    let visible = match mask {
        Some(mask) => mask.shallow_clone(),
        None => band([q.size()[2], k.size()[2]], 0, None, q)?,
    };
    of_heads(q, k, v, &visible, options)
}
