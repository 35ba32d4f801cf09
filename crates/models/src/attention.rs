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
//! | CPU | any | flash (Dao, arXiv:2307.08691), [this project's](kernels::attention) | the same |
//! | CUDA | bf16, fp16 | the fastest of cuDNN's, flash and memory-efficient, [measured](kernels::attention::backend) | flash, variable length |
//! | CUDA | fp32 | memory-efficient (Rabe & Staats, arXiv:2112.05682) | the same, variable length |
//! | any | f64 on CUDA; any on the CPU with dropout | libtorch's `math` kernel: all pairs | on the CPU one call per document |
//!
//! No kernel computes pairs of two documents, so the work is Σ lengthᵢ² instead of (Σ lengthᵢ)², and no mask exists. libtorch's kernels for the
//! CPU know no documents: each is a view of the packed row there. (With a boolean mask its flash kernel would compute all pairs.)
//!
//! # Grouped queries
//!
//! With h query heads for g heads of keys and values (Ainslie et al., arXiv:2305.13245), query head i reads key head i / (h/g).
//! Flash and cuDNN's kernel support this without copies, forward and backward; the memory-efficient kernel does in some versions of
//! libtorch, which is asked. Elsewhere, and in the explicit form, keys and values are copied.
//!
//! # Sliding windows
//!
//! With a window w (Child et al., arXiv:1904.10509), query i attends to keys i − w + 1 to i of its document. On the CPU without dropout the
//! kernel skips the blocks of keys that no query of a block sees. Elsewhere `Fused` computes the first w queries of a document as without a
//! window, and the others in chunks of c ≤ w/2 queries over w − 1 + c keys with one mask `[c, w − 1 + c]`: the work is t·(w + c), and
//! nothing of size t² is allocated. Documents of at most w tokens take the path without a window.
//!
//! # Soft caps
//!
//! A cap c replaces a score s by c·tanh(s/c) (Gemma 2, arXiv:2408.00118). This project's kernels for the CPU compute it; no kernel of libtorch
//! does, so that elsewhere, and with dropout, the scores are explicit, for each document and chunk of a window: one keeps three numbers per
//! pair of query and key.
//!
//! # Sinks
//!
//! A sink a of a head is one more score of each of its queries, whose weight multiplies no value (gpt-oss, arXiv:2508.10925; Xiao et al.,
//! arXiv:2309.17453): o_i = Σ_j exp(s_ij)·v_j / (exp(a) + Σ_j exp(s_ij)), so that a head may attend to nothing. It is trained, neither scaled nor
//! capped, and belongs to every document and window. This project's kernels for the CPU compute it; elsewhere the scores are explicit, as for
//! soft caps.

mod cached;
mod documents;
mod explicit;
mod windowed;

use kernels::attention::{ScaledDotProductOptions, takes_groups};
use runtime::device::graph::operators_only;
use runtime::ops::attention::{Options, Packing, efficient_attention, flash_attention};
use runtime::precision;
use runtime::tensor_layout::TensorLayout;
use tch::{Device, Kind, Tensor};

pub(crate) use cached::cached_attention;
pub use decoder::AttentionPath;
pub use documents::Documents;
use explicit::{additive_mask, explicit, visible};
use windowed::by_kernel;
pub(crate) use windowed::{attention_of_rows, has_kernel, over_window};

use crate::error::{Error, Result, wrong_shape};

/// Options of [`attention`].
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionConfig<'a> {
    /// The implementation.
    pub path: AttentionPath,
    /// Probability that an attention weight is dropped; 0 outside training.
    pub dropout: f64,
    /// Factor of the scores; 1/√head if absent.
    pub scale: Option<f64>,
    /// Number of tokens that a query attends to, itself included ([sliding window](self#sliding-windows)); `None` for all of its
    /// document.
    pub window: Option<i64>,
    /// c of c·tanh(s/c), to which each score s is limited ([soft cap](self#soft-caps)).
    pub softcap: Option<f64>,
    /// The [sink](self#sinks) of each query head, `[heads]`.
    pub sinks: Option<&'a Tensor>,
}

impl AttentionConfig<'_> {
    /// Whether libtorch's kernels compute it, which know neither soft caps nor sinks.
    pub(crate) fn is_plain(&self) -> bool {
        self.softcap.is_none() && self.sinks.is_none()
    }

    /// The factor of the scores of heads of this width.
    pub(crate) fn scale_of(&self, head: i64) -> f64 {
        self.scale.unwrap_or_else(|| 1.0 / (head as f64).sqrt())
    }
}

/// [`attention`] with all tokens before, the scale 1/√head and no cap.
///
/// # Errors
/// As [`attention`].
pub fn causal_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    documents: Option<&Documents>,
    path: AttentionPath,
    dropout: f64,
) -> Result<Tensor> {
    attention(q, k, v, documents, &AttentionConfig { path, dropout, ..AttentionConfig::default() })
}

/// Computes attention of `q` `[batch, sequence, heads, head]` over `k` and `v` `[batch, sequence, kv_heads, head]`, all of one
/// dtype. Returns `[batch, sequence, heads·head]`. kv_heads must divide heads: see [grouped queries](self#grouped-queries).
///
/// With dropout, libtorch's CPU has no fused kernel and uses the explicit form.
///
/// # Errors
/// Shapes that do not match, heads that kv_heads does not divide, options outside their ranges, documents of other rows.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    documents: Option<&Documents>,
    options: &AttentionConfig<'_>,
) -> Result<Tensor> {
    let [batch, sequence, heads, head] = check([q, k, v], documents, options)?;
    let options = effective(options, sequence, documents);
    // A mixed-precision policy, if there is one, decides the dtype.
    let o_bthe = precision::attend(q, k, v, &|q, k, v| attend(q, k, v, documents, &options))?;
    Ok(o_bthe.f_reshape([batch, sequence, heads * head])?)
}

/// Returns the options without a window of at least the longest document, which has no effect.
pub(crate) fn effective<'a>(
    options: &AttentionConfig<'a>,
    sequence: i64,
    documents: Option<&Documents>,
) -> AttentionConfig<'a> {
    let longest = documents.map_or(sequence, Documents::longest);
    AttentionConfig { window: options.window.filter(|&window| window < longest), ..*options }
}

/// [`attention`] of checked arguments with [`effective`] options: `[batch, sequence, heads, head]`.
pub(crate) fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    documents: Option<&Documents>,
    options: &AttentionConfig<'_>,
) -> Result<Tensor> {
    let &AttentionConfig { path, dropout, scale, window, .. } = options;
    let (of_q, of_k) = (TensorLayout::of(q)?, TensorLayout::of(k)?);
    let (heads, kv_heads) = (of_q.size()[2], of_k.size()[2]);
    let grouped = heads != kv_heads;
    if grouped && !supports_grouped_queries(options, [q, k, v], documents.is_some())? {
        let [k, v] = [repeat_heads(k, heads)?, repeat_heads(v, heads)?];
        return attend(q, &k, &v, documents, options);
    }
    match (path, documents) {
        (AttentionPath::DenseMask, _) if options.is_plain() => {
            let mask = additive_mask(q, documents, window)?;
            heads_first(q, k, v, |q, k, v| {
                let mask = Some(&mask);
                Ok(Tensor::f_scaled_dot_product_attention(q, k, v, mask, dropout, false, scale, grouped)?)
            })
        }
        (AttentionPath::Explicit | AttentionPath::DenseMask, _) => {
            explicit(q, k, v, &visible(q, documents, window)?, options)
        }
        // One path for documents that the host knows and for those of a recorded step.
        (AttentionPath::Fused, Some(_)) if q.device() == Device::Cpu && operators_only() => {
            let options = AttentionConfig { path: AttentionPath::Explicit, ..*options };
            attend(q, k, v, documents, &options)
        }
        (AttentionPath::Fused, None) => of_one_document(q, k, v, options),
        (AttentionPath::Fused, Some(documents))
            if of_q.device().is_cuda() && window.is_none() && options.is_plain() =>
        {
            packed_on_cuda(q, k, v, documents, options)
        }
        (AttentionPath::Fused, Some(documents)) if documents.are_on_host() => {
            if has_kernel(&of_q, options) {
                return heads_first(q, k, v, |q, k, v| by_kernel(q, k, v, options, Some(documents)));
            }
            per_document(q, k, v, documents, options)
        }
        (AttentionPath::Fused, Some(_)) => {
            let reason = "packed documents with a window, a cap or sinks are attended to one by one, which a graph cannot repeat for others";
            Err(Error::invalid("attention", reason))
        }
    }
}

/// Whether the kernel of this path, device and dtype supports grouped queries without copies. (libtorch's own `math` on the
/// CPU, for dropout or a mask, makes the copies itself.)
fn supports_grouped_queries(options: &AttentionConfig<'_>, qkv: [&Tensor; 3], packed: bool) -> Result<bool> {
    let [q, k, v] = qkv;
    Ok(match options.path {
        AttentionPath::Fused if has_kernel(&TensorLayout::of(q)?, options) => true,
        _ if !options.is_plain() => false,
        AttentionPath::Explicit => false,
        AttentionPath::DenseMask => !q.device().is_cuda(),
        AttentionPath::Fused if !q.device().is_cuda() => true,
        AttentionPath::Fused if low(q.kind()) => options.window.is_none(),
        AttentionPath::Fused if packed || options.window.is_some() => false,
        AttentionPath::Fused => {
            let [q, k, v] = [q.f_transpose(1, 2)?, k.f_transpose(1, 2)?, v.f_transpose(1, 2)?];
            let &AttentionConfig { dropout, scale, .. } = options;
            takes_groups(&q, &k, &v, ScaledDotProductOptions { mask: None, dropout, scale })?
        }
    })
}

/// Repeats each head of `[b, t, kv_heads, head]` for its group of queries: `[b, t, heads, head]`.
pub(crate) fn repeat_heads(x: &Tensor, heads: i64) -> Result<Tensor> {
    let (batch, sequence, kv_heads, head) = x.size4()?;
    if heads == kv_heads {
        return Ok(x.shallow_clone());
    }
    let groups = x.f_unsqueeze(3)?.f_expand([batch, sequence, kv_heads, heads / kv_heads, head], false)?;
    Ok(groups.f_reshape([batch, sequence, heads, head])?)
}

/// Attention over rows that are one document each, within the window.
fn of_one_document(q: &Tensor, k: &Tensor, v: &Tensor, options: &AttentionConfig<'_>) -> Result<Tensor> {
    heads_first(q, k, v, |q, k, v| over_window(q, k, v, options))
}

/// Transposes to heads first, as libtorch's operator expects (the transposes are views).
fn heads_first(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    attend: impl FnOnce(&Tensor, &Tensor, &Tensor) -> runtime::Result<Tensor>,
) -> Result<Tensor> {
    let [q, k, v] = [q.f_transpose(1, 2)?, k.f_transpose(1, 2)?, v.f_transpose(1, 2)?];
    Ok(attend(&q, &k, &v)?.f_transpose(1, 2)?)
}

/// Attention over packed rows, document by document: each is a view.
fn per_document(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    documents: &Documents,
    options: &AttentionConfig<'_>,
) -> Result<Tensor> {
    let lengths = documents.starts().windows(2).map(|pair| i64::from(pair[1] - pair[0]));
    let lengths: Vec<i64> = lengths.filter(|&length| length > 0).collect();
    // One split has one backward, which concatenates; a narrow per document would add up as many full-sized gradients.
    let split = |x: &Tensor| -> Result<Vec<Tensor>> {
        let (batch, sequence, heads, head) = x.size4()?;
        let flat = x.f_reshape([1, batch * sequence, heads, head])?;
        Ok(flat.f_split_with_sizes(&lengths, 1)?)
    };
    let (qs, ks, vs) = (split(q)?, split(k)?, split(v)?);
    let parts = qs.iter().zip(&ks).zip(&vs).map(|((q, k), v)| of_one_document(q, k, v, options));
    let parts: Vec<Tensor> = parts.collect::<Result<_>>()?;
    Ok(Tensor::f_cat(&parts, 1)?)
}

fn packed_on_cuda(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    documents: &Documents,
    options: &AttentionConfig<'_>,
) -> Result<Tensor> {
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
    let options = Options { causal: true, dropout: options.dropout, scale: Some(options.scale_of(head)) };
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

/// Returns the shape of q.
pub(crate) fn check(
    [q, k, v]: [&Tensor; 3],
    documents: Option<&Documents>,
    options: &AttentionConfig<'_>,
) -> Result<[i64; 4]> {
    let layouts = [TensorLayout::of(q)?, TensorLayout::of(k)?, TensorLayout::of(v)?];
    let size = check_sizes(layouts.each_ref().map(TensorLayout::size), options)?;
    let Some(ids) = documents.map(Documents::ids) else { return Ok(size) };
    if ids.size() != size[..2] {
        let expected = format!("{:?}, the shape of the rows", &size[..2]);
        return Err(wrong_shape("attention", "document ids", ids.size(), expected));
    }
    if ids.device() != q.device() {
        let reason = format!(
            "the documents are on {:?} and the rows on {:?}; expected one device",
            ids.device(),
            q.device()
        );
        return Err(Error::invalid("attention", reason));
    }
    Ok(size)
}

/// Returns the shape of q, checked with those of k and v and with the options.
fn check_sizes([shape, of_k, of_v]: [&[i64]; 3], options: &AttentionConfig<'_>) -> Result<[i64; 4]> {
    let operation = "attention";
    let &[batch, sequence, heads, head] = shape else {
        let expected = "[batch, sequence, heads, head]".to_owned();
        return Err(wrong_shape(operation, "q", shape, expected));
    };
    let kv_heads = of_k.get(2).copied().unwrap_or(0);
    if of_k.len() != 4 || [of_k[0], of_k[1], of_k[3]] != [shape[0], shape[1], shape[3]] {
        let expected = format!("[{}, {}, heads, {}], as q", shape[0], shape[1], shape[3]);
        return Err(wrong_shape(operation, "k", of_k, expected));
    }
    if kv_heads < 1 || shape[2] % kv_heads != 0 {
        let reason = format!("{kv_heads} key heads do not divide {} query heads", shape[2]);
        return Err(Error::invalid(operation, reason));
    }
    if of_v != of_k {
        return Err(wrong_shape(operation, "v", of_v, format!("{of_k:?}, as k")));
    }
    let &AttentionConfig { dropout, scale, window, softcap, sinks, .. } = options;
    let refuse = |reason: String| Err(Error::invalid(operation, reason));
    if !(0.0..1.0).contains(&dropout) {
        return refuse(format!("dropout is {dropout}; expected a probability in [0, 1)"));
    }
    if let Some(window) = window.filter(|&window| window < 1) {
        return refuse(format!("the window is {window} tokens; expected at least 1, the token itself"));
    }
    for (name, number) in [("scale", scale), ("soft cap", softcap)] {
        if let Some(number) = number.filter(|number| !(number.is_finite() && *number > 0.0)) {
            return refuse(format!("the {name} is {number}; expected a finite number above 0"));
        }
    }
    if let Some(sinks) = sinks.filter(|sinks| sinks.size() != [heads]) {
        return Err(wrong_shape(
            operation,
            "sinks",
            sinks.size(),
            format!("[{heads}], one for each query head"),
        ));
    }
    Ok([batch, sequence, heads, head])
}
