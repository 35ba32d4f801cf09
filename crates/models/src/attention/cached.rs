//! Attention of new tokens over a cache of earlier ones, by libtorch's kernels; on the CPU the same flash kernel as in
//! training.

use tch::Tensor;

use crate::error::Result;

/// Computes attention of `q` `[b, t, heads, head]`, the last t of n tokens, over `k` and `v` `[b, kv_heads, n, head]`. Returns
/// `[b, t, heads·head]`.
///
/// `mask`, `[b or 1, 1, t, n]`, bool, is true where a query attends. Without a mask, either t = 1 and the query attends to all
/// keys, or t = n and attention is causal.
pub(crate) fn cached_attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let (batch, new, heads, head) = q.size4()?;
    let (_, kv_heads, _, _) = k.size4()?;
    let flat = |o: Tensor| -> Result<Tensor> { Ok(o.f_reshape([batch, new, heads * head])?) };
    if new == 1 {
        // The queries that share a key head become its rows, so that each key is read once for all of them.
        let q = q.f_reshape([batch, kv_heads, heads / kv_heads, head])?;
        return flat(Tensor::f_scaled_dot_product_attention(&q, k, v, mask, 0.0, false, None, false)?);
    }
    let q = q.f_transpose(1, 2)?;
    let causal = mask.is_none();
    let o = Tensor::f_scaled_dot_product_attention(&q, k, v, mask, 0.0, causal, None, kv_heads != heads)?;
    flat(o.f_transpose(1, 2)?)
}
