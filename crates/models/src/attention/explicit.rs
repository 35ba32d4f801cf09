//! Attention with scores, softmax and products as separate tensors, and the masks of whole rows.

use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use super::{AttentionConfig, Documents, low};
use crate::error::Result;

/// Attention over the keys that `visible` has, `[t, t]` or `[b, 1, t, t]`; rows `[b, t, heads, head]`.
pub(super) fn explicit(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    visible: &Tensor,
    options: &AttentionConfig<'_>,
) -> Result<Tensor> {
    let [q, k, v] = [q.f_transpose(1, 2)?, k.f_transpose(1, 2)?, v.f_transpose(1, 2)?];
    Ok(of_heads(&q, &k, &v, visible, options)?.f_transpose(1, 2)?)
}

/// [`explicit`] for `[b, heads, queries, head]` and `[b, heads, keys, head]`, with a mask that broadcasts to
/// `[b, heads, queries, keys]`.
pub(super) fn of_heads(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    visible: &Tensor,
    options: &AttentionConfig<'_>,
) -> Result<Tensor> {
    let scale = options.scale_of(q.size()[3]);
    let scores = q.f_matmul(&k.f_transpose(2, 3)?)?.try_mul_scalar(scale)?;
    let scores = match options.softcap {
        Some(cap) => scores.try_div_scalar(cap)?.f_tanh()?.try_mul_scalar(cap)?,
        None => scores,
    };
    // The softmax of low precision is computed in fp32 and rounded for the product.
    let wide = if low(scores.kind()) { Kind::Float } else { scores.kind() };
    let hidden = visible.f_logical_not()?;
    let scores_seen = scores.try_masked_fill(&hidden, f64::NEG_INFINITY)?;
    let weights = match options.sinks {
        Some(sinks) => softmax_with(sinks, &scores_seen, wide)?,
        None => scores_seen.f_softmax(-1, wide)?,
    };
    let weights = weights.f_to_kind(scores.kind())?;
    let weights = if options.dropout > 0.0 { weights.f_dropout(options.dropout, true)? } else { weights };
    Ok(weights.f_matmul(v)?)
}

/// The softmax of scores `[b, heads, queries, keys]` and one sink for each head, without the sink's weight.
fn softmax_with(sinks: &Tensor, scores: &Tensor, wide: Kind) -> Result<Tensor> {
    let (batch, heads, queries, keys) = scores.size4()?;
    let column =
        sinks.f_to_kind(wide)?.f_view([1, heads, 1, 1])?.f_expand([batch, heads, queries, 1], false)?;
    let all = Tensor::f_cat(&[scores.f_to_kind(wide)?, column], -1)?;
    Ok(all.f_softmax(-1, wide)?.f_narrow(-1, 0, keys)?)
}

/// 0 where a query attends, −∞ elsewhere, in the scores' dtype.
pub(super) fn additive_mask(
    q: &Tensor,
    documents: Option<&Documents>,
    window: Option<i64>,
) -> Result<Tensor> {
    let hidden = visible(q, documents, window)?.f_logical_not()?;
    let zeros = Tensor::f_zeros(hidden.size(), (Kind::Float, q.device()))?;
    Ok(zeros.try_masked_fill(&hidden, f64::NEG_INFINITY)?.f_to_kind(q.kind())?)
}

/// Returns whether each query of full rows attends to each key: `[t, t]`, or `[b, 1, t, t]` with documents.
pub(super) fn visible(q: &Tensor, documents: Option<&Documents>, window: Option<i64>) -> Result<Tensor> {
    let sequence = q.size()[1];
    let causal = band([sequence, sequence], 0, window, q)?;
    match documents {
        None => Ok(causal),
        Some(documents) => {
            let ids = documents.ids();
            let same = ids.f_unsqueeze(2)?.f_eq_tensor(&ids.f_unsqueeze(1)?)?;
            Ok(same.f_logical_and(&causal)?.f_unsqueeze(1)?)
        }
    }
}

/// `[queries, keys]`, true where query i attends to key j: j ≤ i + `before`, and within the window. `before` is the number of keys
/// before the first query's own.
pub(super) fn band(
    [queries, keys]: [i64; 2],
    before: i64,
    window: Option<i64>,
    on: &Tensor,
) -> Result<Tensor> {
    let causal = Tensor::f_ones([queries, keys], (Kind::Bool, on.device()))?.f_tril(before)?;
    Ok(match window {
        Some(window) => causal.f_triu(before - (window - 1))?,
        None => causal,
    })
}
