//! Attention over sequences of different lengths, CUDA only.
//!
//! softmax(q·kᵀ·scale)·v for every sequence and head. Packed: q `[tokens, heads, head]`, k and v `[tokens, kv_heads,
//! head]` with the sequences concatenated, and the start of each. Not packed: a leading batch dimension, all sequences
//! of the same length. The operators have a derivative.
//!
//! libtorch has neither on the CPU: use `Tensor::scaled_dot_product_attention` with a boolean mask.
//!
//! [`backend`] is about that operator: which kernel it uses.

pub mod backend;

use tch::{Device, Kind, Tensor};

use super::{Value, call, tensors};
use crate::error::{Error, Result};

/// The starts of packed sequences.
#[derive(Debug, Clone, Copy)]
pub struct Packing<'a> {
    /// `[sequences + 1]`, int32, on the queries' device: 0, the end of the first sequence, …, the number of tokens.
    pub cu_seqlens_q: &'a Tensor,
    /// The same for keys and values.
    pub cu_seqlens_k: &'a Tensor,
    /// The longest sequence of queries.
    pub max_seqlen_q: i64,
    /// The longest sequence of keys.
    pub max_seqlen_k: i64,
}

/// Options of both operators.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Options {
    /// Whether each query attends only to keys up to its own position, aligned at the end of both sequences.
    pub causal: bool,
    /// Probability that a weight is dropped, in [0, 1).
    pub dropout: f64,
    /// Factor of the scores; 1/√head if absent.
    pub scale: Option<f64>,
}

/// `_flash_attention_forward` (Dao, arXiv:2307.08691): float16 and bfloat16. Returns the output, shaped as q, and each
/// row's log-sum-exp.
///
/// # Errors
/// [`Error::Unavailable`] without CUDA, [`Error::Invalid`] for shapes, kinds and lengths that do not match, and those
/// of [`call`].
pub fn flash_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    packing: Option<Packing<'_>>,
    options: Options,
) -> Result<(Tensor, Tensor)> {
    check("flash_attention", [q, k, v], packing, options)?;
    let lengths = packing.map_or([q.size()[1], k.size()[1]], |p| [p.max_seqlen_q, p.max_seqlen_k]);
    let arguments = [
        q.into(),
        k.into(),
        v.into(),
        packing.map(|p| p.cu_seqlens_q).into(),
        packing.map(|p| p.cu_seqlens_k).into(),
        lengths[0].into(),
        lengths[1].into(),
        options.dropout.into(),
        options.causal.into(),
        false.into(),
    ];
    let results = call("aten::_flash_attention_forward", "", &arguments, &[("scale", options.scale.into())])?;
    let [output, logsumexp] = tensors(results)?;
    Ok((output, logsumexp))
}

/// `_efficient_attention_forward` (Rabe & Staats, arXiv:2112.05682; xFormers' kernel): also float32. Returns the
/// output, shaped as q, and each row's log-sum-exp.
///
/// # Errors
/// As [`flash_attention`].
pub fn efficient_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    packing: Option<Packing<'_>>,
    options: Options,
) -> Result<(Tensor, Tensor)> {
    /// xFormers' value for a mask aligned at the lower right corner.
    const CAUSAL_FROM_BOTTOM_RIGHT: i64 = 2;
    check("efficient_attention", [q, k, v], packing, options)?;
    // The kernel requires a batch dimension, of size 1 for packed sequences.
    let batched = |x: &Tensor| if packing.is_some() { x.f_unsqueeze(0) } else { Ok(x.shallow_clone()) };
    let arguments = [
        batched(q)?.into(),
        batched(k)?.into(),
        batched(v)?.into(),
        Value::None,
        packing.map(|p| p.cu_seqlens_q).into(),
        packing.map(|p| p.cu_seqlens_k).into(),
        packing.map(|p| p.max_seqlen_q).into(),
        packing.map(|p| p.max_seqlen_k).into(),
        options.dropout.into(),
        (if options.causal { CAUSAL_FROM_BOTTOM_RIGHT } else { 0 }).into(),
        true.into(),
    ];
    let results =
        call("aten::_efficient_attention_forward", "", &arguments, &[("scale", options.scale.into())])?;
    let [output, logsumexp] = tensors(results)?;
    Ok((if packing.is_some() { output.f_squeeze_dim(0)? } else { output }, logsumexp))
}

fn check(
    operation: &'static str,
    qkv: [&Tensor; 3],
    packing: Option<Packing<'_>>,
    options: Options,
) -> Result<()> {
    let invalid = |reason: String| Err(Error::invalid(operation, reason));
    let sizes = qkv.map(Tensor::size);
    let rank = if packing.is_some() { 3 } else { 4 };
    if sizes.iter().any(|size| size.len() != rank) {
        let layout = if packing.is_some() { "[tokens, heads, head]" } else { "[batch, tokens, heads, head]" };
        return invalid(format!("q, k, v have the shapes {sizes:?}; expected {layout}"));
    }
    if !(0.0..1.0).contains(&options.dropout) {
        return invalid(format!("dropout {}; expected a probability in [0, 1)", options.dropout));
    }
    for cu_seqlens in packing.iter().flat_map(|p| [p.cu_seqlens_q, p.cu_seqlens_k]) {
        if cu_seqlens.kind() != Kind::Int || cu_seqlens.dim() != 1 || cu_seqlens.device() != qkv[0].device() {
            return invalid(format!(
                "the starts of the sequences are {:?} {:?} on {:?}; expected Int [sequences + 1] on {:?}",
                cu_seqlens.kind(),
                cu_seqlens.size(),
                cu_seqlens.device(),
                qkv[0].device(),
            ));
        }
    }
    match qkv.iter().map(|tensor| tensor.device()).find(|device| !matches!(device, Device::Cuda(_))) {
        None => Ok(()),
        Some(device) => Err(Error::Unavailable {
            what: format!("{operation} on {device:?}"),
            reason: "libtorch has it for CUDA only; on the CPU use scaled_dot_product_attention with a boolean mask"
                .into(),
        }),
    }
}
