//! Attention of new tokens over a cache of earlier ones; a whole prompt takes the same kernel as in training.

use kernels::attention::{
    ScaledDotProductOptions, SingleQueryOptions, scaled_dot_product, single_query_attention, takes,
};
use tch::{Kind, Tensor};

use super::AttentionConfig;
use super::explicit::of_heads;
use crate::error::Result;

/// Computes attention of `q` `[b, t, heads, head]`, the last t of n tokens, over `k` and `v` `[b, kv_heads, n, head]`. Returns
/// `[b, t, heads·head]`.
///
/// `mask`, `[b or 1, 1, t, n]`, bool, is true where a query attends. Without a mask, either t = 1 and the query attends to all
/// keys, or t = n and attention is causal. Of the options, the scale, the cap and the sinks apply.
pub(crate) fn cached_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    options: &AttentionConfig<'_>,
) -> Result<Tensor> {
    let (batch, new, heads, head) = q.size4()?;
    let (_, kv_heads, keys, _) = k.size4()?;
    let flat = |o: Tensor| -> Result<Tensor> { Ok(o.f_reshape([batch, new, heads * head])?) };
    let scale = options.scale;
    if new == 1 && takes(q.device(), q.kind()) {
        // `[b or 1, 1, 1, n]`.
        let mask = mask.map(|mask| mask.f_reshape([-1, keys])).transpose()?;
        let options =
            SingleQueryOptions { mask: mask.as_ref(), scale, cap: options.softcap, sinks: options.sinks };
        return flat(single_query_attention(&q.f_reshape([batch, heads, head])?, k, v, options)?);
    }
    if !options.is_plain() {
        let repeat = |x: &Tensor| -> Result<Tensor> {
            let group = heads / kv_heads;
            let groups = x.f_unsqueeze(2)?.f_expand([batch, kv_heads, group, keys, head], false)?;
            Ok(groups.f_reshape([batch, heads, keys, head])?)
        };
        let all = Tensor::f_ones([new, keys], (Kind::Bool, q.device()))?.f_tril(keys - new)?;
        let mask = mask.unwrap_or(&all);
        let o = of_heads(&q.f_transpose(1, 2)?, &repeat(k)?, &repeat(v)?, mask, options)?;
        return flat(o.f_transpose(1, 2)?);
    }
    if new == 1 {
        // The queries that share a key head become its rows, so that each key is read once for all of them.
        let q = q.f_reshape([batch, kv_heads, heads / kv_heads, head])?;
        return flat(Tensor::f_scaled_dot_product_attention(&q, k, v, mask, 0.0, false, scale, false)?);
    }
    let q = q.f_transpose(1, 2)?;
    let o = scaled_dot_product(&q, k, v, ScaledDotProductOptions { mask, dropout: 0.0, scale })?;
    flat(o.f_transpose(1, 2)?)
}
