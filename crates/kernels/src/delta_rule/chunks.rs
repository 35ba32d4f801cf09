//! The operands of a span of chunks, and the pass forward. The mathematics is in the [module above](super).
//!
//! Dimensions: b rows, h key heads, r value heads of a key head, c chunks, n tokens of a chunk.

use runtime::Result;
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use super::{DeltaInputs, Sizes, normalise};

/// Maximum number of tokens of a chunk.
const CHUNK: i64 = 64;
/// Chunks of a span, whose operands exist at one time.
const SPAN: i64 = 16;
/// Of blocks of this size, (I + M)⁻¹ = I − M.
const BLOCK: i64 = 2;

/// The tokens of a span.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tokens {
    pub(super) start: i64,
    pub(super) count: i64,
    /// Tokens of a chunk, a power of two; the last chunk is filled up with zeros.
    chunk: i64,
}

/// Divides rows of so many tokens into spans.
pub(super) fn spans(sequence: i64) -> Vec<Tokens> {
    let chunk = (sequence.max(1) as u64).next_power_of_two().min(CHUNK as u64) as i64;
    let starts = (0..sequence).step_by((chunk * SPAN) as usize);
    starts.map(|start| Tokens { start, count: (sequence - start).min(chunk * SPAN), chunk }).collect()
}

impl Tokens {
    /// Returns the chunks' number.
    pub(super) fn chunks(&self) -> i64 {
        (self.count + self.chunk - 1) / self.chunk
    }

    /// Zeros after the last token.
    fn padding(&self) -> i64 {
        self.chunks() * self.chunk - self.count
    }

    /// Returns the span's part of `[b, t, h·r, width]` as `[b, h, r, c, n, width]` of this dtype, with zeros after the last token.
    pub(super) fn split(&self, x: &Tensor, key_heads: i64, kind: Kind) -> Result<Tensor> {
        let (batch, _, heads, width) = x.size4()?;
        let part = x.f_narrow(1, self.start, self.count)?.f_to_kind(kind)?;
        let part = match self.padding() {
            0 => part,
            padding => part.f_constant_pad_nd([0, 0, 0, 0, 0, padding])?,
        };
        let shape = [batch, self.chunks(), self.chunk, key_heads, heads / key_heads, width];
        Ok(part.f_reshape(shape)?.f_permute([0, 3, 4, 1, 2, 5])?.f_contiguous()?)
    }

    /// Returns `[b, h, r, c, n, width]` as `[b, tokens, h·r, width]`: the inverse of [`Tokens::split`].
    pub(super) fn join(&self, x: &Tensor, kind: Kind) -> Result<Tensor> {
        let size = x.size();
        let &[batch, key_heads, group, chunks, chunk, width] = size.as_slice() else {
            return Ok(x.f_alias()?);
        };
        let rows = x.f_permute([0, 3, 4, 1, 2, 5])?;
        let rows = rows.f_reshape([batch, chunks * chunk, key_heads * group, width])?;
        Ok(rows.f_narrow(1, 0, self.count)?.f_to_kind(kind)?)
    }
}

/// The operands of a span.
pub(super) struct Span {
    pub(super) tokens: Tokens,
    /// Normalised queries and keys, `[b, h, 1, c, n, key]`.
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    /// Values, `[b, h, r, c, n, value]`.
    pub(super) v: Tensor,
    /// β, `[b, h, r, c, n, 1]`.
    pub(super) beta: Tensor,
    /// e^c, `[b, h, r, c, n, 1]`.
    pub(super) enter: Tensor,
    /// e^(cₙ − c), `[b, h, r, c, n, 1]`.
    pub(super) leave: Tensor,
    /// e^cₙ, `[b, h, r, c, 1, 1]`.
    pub(super) pass: Tensor,
    /// D, `[b, h, r, c, n, n]`.
    pub(super) decay: Tensor,
    /// KKᵀ, `[b, h, 1, c, n, n]`.
    pub(super) kk: Tensor,
    /// A, `[b, h, r, c, n, n]`.
    pub(super) inverse: Tensor,
    /// P, `[b, h, r, c, n, n]`.
    pub(super) p: Tensor,
    /// K̂, `[b, h, r, c, n, key]`.
    pub(super) k_leave: Tensor,
}

/// The results of a pass over a span.
pub(super) struct Passed {
    /// N, `[b, h, r, c, n, value]`.
    pub(super) new_values: Tensor,
    /// QS, `[b, h, r, c, n, value]`, if queries were asked for.
    pub(super) read: Option<Tensor>,
    /// The state before each chunk, if they were asked for.
    pub(super) states: Vec<Tensor>,
    /// The state after the span, `[b, h, r, key, value]`.
    pub(super) state: Tensor,
}

/// Returns the transpose of matrices.
pub(super) fn transpose(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_transpose(-1, -2)?)
}

impl Span {
    pub(super) fn new(
        inputs: &DeltaInputs<'_>,
        documents: Option<&Tensor>,
        sizes: &Sizes,
        tokens: Tokens,
        kind: Kind,
    ) -> Result<Self> {
        let heads = sizes.key_heads;
        let split = |x: &Tensor| tokens.split(x, heads, kind);
        let (q, _) = normalise(&split(inputs.q)?)?;
        let q = q.try_mul_scalar((sizes.key as f64).powf(-0.5))?;
        let (k, _) = normalise(&split(inputs.k)?)?;
        let v = split(inputs.v)?;
        let beta = split(&inputs.beta.f_unsqueeze(-1)?)?;
        let c = split(&inputs.g.f_unsqueeze(-1)?)?.f_cumsum(-2, kind)?;

        // The exponents, −∞ where the factor is 0, before any exponential.
        let masks = Masks::new(documents, tokens, sizes, &c)?;
        let end = c.f_narrow(-2, tokens.chunk - 1, 1)?;
        let decay = masks.within.factor(c.f_sub(&transpose(&c)?)?)?;
        let leave = masks.leaves.as_ref();
        let leave = optional_factor(leave, end.f_sub(&c)?)?;
        // Of its own: `end` is a part of c, which becomes e^c.
        let pass = optional_factor(masks.passes.as_ref(), end.f_add(&end.f_zeros_like()?)?)?;
        let enter = optional_factor(masks.enters.as_ref(), c)?;

        let kk = k.f_matmul(&transpose(&k)?)?;
        let m = kk.f_mul(&decay)?.f_mul_(&beta)?.f_tril_(-1)?;
        let inverse = inverse(&m)?;
        let p = q.f_matmul(&transpose(&k)?)?.f_mul(&decay)?;
        let k_leave = k.f_mul(&leave)?;
        Ok(Self { tokens, q, k, v, beta, enter, leave, pass, decay, kk, inverse, p, k_leave })
    }

    /// Goes over the chunks from a state `[b, h, r, key, value]`.
    pub(super) fn advance(&self, state: &Tensor, reads: bool, keeps_states: bool) -> Result<Passed> {
        let mut state = state.shallow_clone();
        let (mut new_values, mut read, mut states) = (Vec::new(), Vec::new(), Vec::new());
        let group = self.v.size()[2];
        // Keys, and queries after them, for each value head.
        let keys = if reads { Tensor::f_cat(&[&self.k, &self.q], -2)? } else { self.k.shallow_clone() };
        let chunk = self.tokens.chunk;
        for index in 0..self.tokens.chunks() {
            let of = |x: &Tensor| x.f_select(3, index);
            let products = by_group(&of(&keys)?, group)?.f_matmul(&state)?;
            let old = products.f_narrow(-2, 0, chunk)?.f_mul(&of(&self.enter)?)?;
            let change = of(&self.v)?.f_sub(&old)?.f_mul(&of(&self.beta)?)?;
            let new = of(&self.inverse)?.f_matmul(&change)?;
            let added = transpose(&of(&self.k_leave)?)?.f_matmul(&new)?;
            let next = state.f_mul(&of(&self.pass)?)?.f_add(&added)?;
            if keeps_states {
                states.push(state);
            }
            if reads {
                read.push(products.f_narrow(-2, chunk, chunk)?);
            }
            new_values.push(new);
            state = next;
        }
        let read = if reads { Some(Tensor::f_stack(&read, 3)?) } else { None };
        Ok(Passed { new_values: Tensor::f_stack(&new_values, 3)?, read, states, state })
    }

    /// O, `[b, h, r, c, n, value]`.
    pub(super) fn outputs(&self, passed: &Passed) -> Result<Tensor> {
        let within = self.p.f_matmul(&passed.new_values)?;
        Ok(match &passed.read {
            Some(read) => within.f_addcmul(read, &self.enter)?,
            None => within,
        })
    }
}

/// Returns `[b, h, 1, …]` for each value head of a key head, `[b, h, r, …]`.
pub(super) fn by_group(x: &Tensor, group: i64) -> Result<Tensor> {
    let mut size = x.size();
    size[2] = group;
    Ok(x.f_expand(size, false)?)
}

/// What is added to an exponent: 0 for pairs of tokens with a factor other than 0, −∞ for all others.
struct Mask(Tensor);

impl Mask {
    fn new(has_factor: &Tensor, kind: Kind) -> Result<Self> {
        let zeros = has_factor.f_zeros_like()?.f_to_kind(kind)?;
        Ok(Self(zeros.try_masked_fill(&has_factor.f_logical_not()?, f64::NEG_INFINITY)?))
    }

    /// e^exponent, or 0 outside the mask.
    fn factor(&self, mut exponent: Tensor) -> Result<Tensor> {
        Ok(exponent.f_add_(&self.0)?.f_exp_()?)
    }
}

fn optional_factor(mask: Option<&Mask>, mut exponent: Tensor) -> Result<Tensor> {
    match mask {
        Some(mask) => mask.factor(exponent),
        None => Ok(exponent.f_exp_()?),
    }
}

struct Masks {
    /// Pairs within a chunk.
    within: Mask,
    /// A token and the last before the chunk.
    enters: Option<Mask>,
    /// A token and the last of the chunk.
    leaves: Option<Mask>,
    /// The last before the chunk and the last of it.
    passes: Option<Mask>,
}

impl Masks {
    fn new(documents: Option<&Tensor>, tokens: Tokens, sizes: &Sizes, like: &Tensor) -> Result<Self> {
        let (Tokens { start, count, chunk }, kind) = (tokens, like.kind());
        let causal = Tensor::f_ones([chunk, chunk], (Kind::Bool, like.device()))?.f_tril(0)?;
        let Some(documents) = documents else {
            let within = Mask::new(&causal, like.kind())?;
            return Ok(Self { within, enters: None, leaves: None, passes: None });
        };
        let part = documents.f_narrow(1, start, count)?;
        let last = part.f_narrow(1, count - 1, 1)?.f_expand([sizes.batch, tokens.padding()], false)?;
        let shape = [sizes.batch, 1, 1, tokens.chunks(), chunk, 1];
        let ids = Tensor::f_cat(&[part, last], 1)?.f_view(shape)?;
        let end = ids.f_narrow(-2, chunk - 1, 1)?;
        // A row's first chunk continues the state that it is given.
        let first = documents.f_narrow(1, (start - 1).max(0), 1)?.f_view([sizes.batch, 1, 1, 1, 1, 1])?;
        let before = Tensor::f_cat(&[first, end.f_narrow(3, 0, tokens.chunks() - 1)?], 3)?;
        Ok(Self {
            within: Mask::new(&ids.f_eq_tensor(&transpose(&ids)?)?.f_logical_and(&causal)?, kind)?,
            enters: Some(Mask::new(&ids.f_eq_tensor(&before)?, kind)?),
            leaves: Some(Mask::new(&ids.f_eq_tensor(&end)?, kind)?),
            passes: Some(Mask::new(&end.f_eq_tensor(&before)?, kind)?),
        })
    }
}

/// Returns (I + M)⁻¹ of strictly lower triangular matrices `[…, n, n]`, n a power of two.
fn inverse(m: &Tensor) -> Result<Tensor> {
    let shape = m.size();
    let n = shape[shape.len() - 1];
    let mut block = n.min(BLOCK);
    // The blocks on the diagonal, `[matrices, n / block, block, block]`.
    let on_diagonal = |block: i64| -> Result<Tensor> {
        let blocks = m.f_reshape([-1, n / block, block, n / block, block])?;
        Ok(blocks.f_diagonal(0, 1, 3)?.f_permute([0, 3, 1, 2])?)
    };
    let diagonal = on_diagonal(block)?.f_contiguous()?;
    let identity = Tensor::f_eye(block, (m.kind(), m.device()))?.f_expand(diagonal.size(), false)?;
    let mut inverse = identity.f_sub(&diagonal)?;
    while block < n {
        let below = on_diagonal(2 * block)?.f_narrow(2, block, block)?.f_narrow(3, 0, block)?;
        let halves = inverse.f_contiguous()?.f_view([-1, n / (2 * block), 2, block, block])?;
        let (first, second) = (halves.f_select(2, 0)?, halves.f_select(2, 1)?);
        let below = second.f_matmul(&below)?.f_matmul(&first)?.f_neg()?;
        let above = below.f_zeros_like()?;
        let rows = [Tensor::f_cat(&[&first, &above], -1)?, Tensor::f_cat(&[&below, &second], -1)?];
        inverse = Tensor::f_cat(&rows, -2)?;
        block *= 2;
    }
    Ok(inverse.f_reshape(shape)?)
}
