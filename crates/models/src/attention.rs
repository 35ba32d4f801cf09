//! Causal attention over rows of one document each, or of packed documents.
//!
//! For queries, keys and values of one head and one document, o_i = Σ_{j ≤ i} softmax_j(q_i·k_j/√e)·v_j. A token never attends
//! to a later token or to another document.
//!
//! [`AttentionPath`] selects one of three implementations with the same result:
//!
//! | path | keeps for backward | work |
//! |---|---|---|
//! | [`Explicit`](AttentionPath::Explicit) | the weights, `[b, h, t, t]` | all pairs |
//! | [`DenseMask`](AttentionPath::DenseMask) | the mask, `[t, t]` or `[b, 1, t, t]` | all pairs |
//! | [`Fused`](AttentionPath::Fused) | one number per query | pairs within a document, up to the diagonal |
//!
//! `Fused` never allocates anything of size t². The device decides which kernel runs:
//!
//! | device | dtype | rows of one document | packed documents |
//! |---|---|---|---|
//! | CPU | any | flash (Dao, arXiv:2307.08691), libtorch's for the CPU | flash, one call per document |
//! | CUDA | bf16, fp16 | flash (or cuDNN's, if libtorch prefers it) | flash, variable length |
//! | CUDA | fp32 | memory-efficient (Rabe & Staats, arXiv:2112.05682) | the same, variable length |
//! | any | f64 on CUDA; any on the CPU with dropout | libtorch's `math` kernel: all pairs | on the CPU one call per document |
//!
//! The CPU has no variable-length kernel. There each document is a view of the packed row, so the work is Σ lengthᵢ² instead of
//! (Σ lengthᵢ)², and no mask exists. (A boolean mask would keep flash too, but compute all pairs.)
//!
//! # Grouped queries
//!
//! With h query heads for g heads of keys and values (Ainslie et al., arXiv:2305.13245), query head i reads key head i / (h/g).
//! Flash supports this without copies, forward and backward, on either device; the memory-efficient kernel and the explicit
//! form need copies of the keys and values.

mod cached;
mod documents;

use runtime::autograd::retain::causal_attention as causal_attention_of_heads;
use runtime::ops::attention::{Options, Packing, efficient_attention, flash_attention};
use runtime::precision;
use tch::{Kind, Tensor};

pub(crate) use cached::cached_attention;
pub use documents::Documents;

use crate::error::{Error, Result};

/// How attention is computed. See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AttentionPath {
    /// Scores, softmax and products as separate tensors: the textbook form, and the oracle of the others.
    Explicit,
    /// libtorch's attention with a mask that each forward builds and converts to the scores' dtype.
    DenseMask,
    /// Allocates nothing of size `t²`.
    #[default]
    Fused,
}

/// Computes attention of `q` `[batch, sequence, heads, head]` over `k` and `v` `[batch, sequence, kv_heads, head]`, all of one
/// dtype. Returns `[batch, sequence, heads·head]`. kv_heads must divide heads: see [grouped queries](self#grouped-queries).
///
/// `dropout` is the probability that an attention weight is dropped; 0 outside training. Above 0, libtorch's CPU has no fused
/// kernel and uses the explicit form.
///
/// # Errors
/// Shapes that do not match, heads that kv_heads does not divide, a dropout outside [0, 1), documents of other rows.
pub fn causal_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    documents: Option<&Documents>,
    path: AttentionPath,
    dropout: f64,
) -> Result<Tensor> {
    check(q, k, v, documents, dropout)?;
    let (batch, sequence, heads, head) = q.size4()?;
    // A mixed-precision policy, if there is one, decides the dtype.
    let o_bthe = precision::attend(q, k, v, &|q, k, v| {
        attend(q, k, v, documents, path, dropout).map_err(|error| match error {
            Error::Runtime(error) => error,
            other => runtime::Error::Other(Box::new(other)),
        })
    })?;
    Ok(o_bthe.f_reshape([batch, sequence, heads * head])?)
}

fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    documents: Option<&Documents>,
    path: AttentionPath,
    dropout: f64,
) -> Result<Tensor> {
    if k.size()[2] != q.size()[2] && !supports_grouped_queries(path, q) {
        let [k, v] = [repeat_kv(k, q.size()[2])?, repeat_kv(v, q.size()[2])?];
        return attend(q, &k, &v, documents, path, dropout);
    }
    match (path, documents) {
        (AttentionPath::Explicit, _) => explicit(q, k, v, documents, dropout),
        (AttentionPath::DenseMask, _) => {
            let mask = additive_mask(q, documents)?;
            heads_first(q, k, v, |q, k, v, grouped| {
                let mask = Some(&mask);
                Ok(Tensor::f_scaled_dot_product_attention(q, k, v, mask, dropout, false, None, grouped)?)
            })
        }
        (AttentionPath::Fused, None) => fused(q, k, v, dropout),
        (AttentionPath::Fused, Some(documents)) if q.device().is_cuda() => {
            packed_on_cuda(q, k, v, documents, dropout)
        }
        (AttentionPath::Fused, Some(documents)) => per_document(q, k, v, documents, dropout),
    }
}

/// Whether the kernel of this path, device and dtype supports grouped queries without copies. (libtorch's own `math` on the
/// CPU, for dropout or a mask, makes the copies itself.)
fn supports_grouped_queries(path: AttentionPath, q: &Tensor) -> bool {
    match path {
        AttentionPath::Explicit => false,
        AttentionPath::DenseMask => !q.device().is_cuda(),
        AttentionPath::Fused => !q.device().is_cuda() || low(q.kind()),
    }
}

/// Repeats each head of `[b, t, kv_heads, head]` for its group of queries: `[b, t, heads, head]`.
fn repeat_kv(x: &Tensor, heads: i64) -> Result<Tensor> {
    let (batch, sequence, kv_heads, head) = x.size4()?;
    let groups = x.f_unsqueeze(3)?.f_expand([batch, sequence, kv_heads, heads / kv_heads, head], false)?;
    Ok(groups.f_reshape([batch, sequence, heads, head])?)
}

fn fused(q: &Tensor, k: &Tensor, v: &Tensor, dropout: f64) -> Result<Tensor> {
    heads_first(q, k, v, |q, k, v, _| causal_attention_of_heads(q, k, v, dropout))
}

/// Transposes to heads first, as libtorch's operator expects (the transposes are views), and tells it about groups.
fn heads_first(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    attend: impl FnOnce(&Tensor, &Tensor, &Tensor, bool) -> runtime::Result<Tensor>,
) -> Result<Tensor> {
    let grouped = q.size()[2] != k.size()[2];
    let [q, k, v] = [q.f_transpose(1, 2)?, k.f_transpose(1, 2)?, v.f_transpose(1, 2)?];
    Ok(attend(&q, &k, &v, grouped)?.f_transpose(1, 2)?)
}

fn per_document(q: &Tensor, k: &Tensor, v: &Tensor, documents: &Documents, dropout: f64) -> Result<Tensor> {
    let lengths = documents.starts().windows(2).map(|pair| i64::from(pair[1] - pair[0]));
    let lengths: Vec<i64> = lengths.filter(|&length| length > 0).collect();
    // One split has one backward, which concatenates; a narrow per document would add up as many full-sized gradients.
    let split = |x: &Tensor| -> Result<Vec<Tensor>> {
        let (batch, sequence, heads, head) = x.size4()?;
        let flat = x.f_reshape([1, batch * sequence, heads, head])?;
        Ok(flat.f_split_with_sizes(&lengths, 1)?)
    };
    let (qs, ks, vs) = (split(q)?, split(k)?, split(v)?);
    let parts: Vec<Tensor> =
        qs.iter().zip(&ks).zip(&vs).map(|((q, k), v)| fused(q, k, v, dropout)).collect::<Result<_>>()?;
    Ok(Tensor::f_cat(&parts, 1)?)
}

fn packed_on_cuda(q: &Tensor, k: &Tensor, v: &Tensor, documents: &Documents, dropout: f64) -> Result<Tensor> {
    let flat = |x: &Tensor| x.f_flatten(0, 1);
    let packing = Packing {
        cu_seqlens_q: documents.cu_seqlens(),
        cu_seqlens_k: documents.cu_seqlens(),
        max_seqlen_q: documents.longest(),
        max_seqlen_k: documents.longest(),
    };
    // The kernels need heads of a multiple of 8 numbers. Zeros change no score, and the extra output columns are cut off.
    const MULTIPLE: i64 = 8;
    let head = q.size()[3];
    let options = Options { causal: true, dropout, scale: Some(1.0 / (head as f64).sqrt()) };
    let padded = |x: &Tensor| match head % MULTIPLE {
        0 => flat(x),
        rest => flat(x)?.f_constant_pad_nd([0, MULTIPLE - rest]),
    };
    let (q, k, v) = (padded(q)?, padded(k)?, padded(v)?);
    let attend = match q.kind() {
        Kind::Half | Kind::BFloat16 => flash_attention,
        _ => efficient_attention,
    };
    let o = attend(&q, &k, &v, Some(packing), options)?.0;
    Ok(if head % MULTIPLE == 0 { o } else { o.f_narrow(2, 0, head)? })
}

fn low(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16)
}

fn explicit(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    documents: Option<&Documents>,
    dropout: f64,
) -> Result<Tensor> {
    let scale = 1.0 / (q.size()[3] as f64).sqrt();
    let hidden = visible(q, documents)?.f_logical_not()?;
    let [q, k, v] = [q.f_transpose(1, 2)?, k.f_transpose(1, 2)?, v.f_transpose(1, 2)?];
    let scores = q.f_matmul(&k.f_transpose(2, 3)?)?.f_mul_scalar(scale)?;
    // The softmax of low precision is computed in fp32 and rounded for the product.
    let wide = if low(scores.kind()) { Kind::Float } else { scores.kind() };
    let weights = scores.f_masked_fill(&hidden, f64::NEG_INFINITY)?.f_softmax(-1, wide)?;
    let weights = weights.f_to_kind(scores.kind())?;
    let weights = if dropout > 0.0 { weights.f_dropout(dropout, true)? } else { weights };
    Ok(weights.f_matmul(&v)?.f_transpose(1, 2)?)
}

/// 0 where a query attends, −∞ elsewhere, in the scores' dtype.
fn additive_mask(q: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
    let hidden = visible(q, documents)?.f_logical_not()?;
    let zeros = Tensor::f_zeros(hidden.size(), (Kind::Float, q.device()))?;
    Ok(zeros.f_masked_fill(&hidden, f64::NEG_INFINITY)?.f_to_kind(q.kind())?)
}

/// Which keys each query attends to: `[t, t]`, or `[b, 1, t, t]` with documents.
fn visible(q: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
    let sequence = q.size()[1];
    let causal = Tensor::f_ones([sequence, sequence], (Kind::Bool, q.device()))?.f_tril(0)?;
    match documents {
        None => Ok(causal),
        Some(documents) => {
            let ids = documents.ids();
            let same = ids.f_unsqueeze(2)?.f_eq_tensor(&ids.f_unsqueeze(1)?)?;
            Ok(same.f_logical_and(&causal)?.f_unsqueeze(1)?)
        }
    }
}

fn check(q: &Tensor, k: &Tensor, v: &Tensor, documents: Option<&Documents>, dropout: f64) -> Result<()> {
    let operation = "attention";
    let shape = q.size();
    if shape.len() != 4 {
        let expected = "[batch, sequence, heads, head]".to_owned();
        return Err(Error::Shape { operation, name: "q", found: shape, expected });
    }
    let of_k = k.size();
    let kv_heads = of_k.get(2).copied().unwrap_or(0);
    if of_k.len() != 4 || [of_k[0], of_k[1], of_k[3]] != [shape[0], shape[1], shape[3]] {
        let expected = format!("[{}, {}, heads, {}], as q", shape[0], shape[1], shape[3]);
        return Err(Error::Shape { operation, name: "k", found: of_k, expected });
    }
    if kv_heads < 1 || shape[2] % kv_heads != 0 {
        let reason = format!("{kv_heads} key heads do not divide {} query heads", shape[2]);
        return Err(Error::Config { what: operation, reason });
    }
    if v.size() != of_k {
        return Err(Error::Shape {
            operation,
            name: "v",
            found: v.size(),
            expected: format!("{of_k:?}, as k"),
        });
    }
    if !(0.0..1.0).contains(&dropout) {
        let reason = format!("dropout is {dropout}; expected a probability in [0, 1)");
        return Err(Error::Config { what: operation, reason });
    }
    let Some(ids) = documents.map(Documents::ids) else { return Ok(()) };
    if ids.size() != shape[..2] {
        let expected = format!("{:?}, the shape of the rows", &shape[..2]);
        return Err(Error::Shape { operation, name: "document ids", found: ids.size(), expected });
    }
    if ids.device() != q.device() {
        let reason = format!(
            "the documents are on {:?} and the rows on {:?}; expected one device",
            ids.device(),
            q.device()
        );
        return Err(Error::Config { what: operation, reason });
    }
    Ok(())
}
