//! The gated delta rule (Yang, Kautz & Hatamizadeh, arXiv:2412.06464): linear attention whose state forgets and overwrites.
//!
//! For each value head, with a state S `[K, V]`, keys and queries of norm 1 (x·rsqrt(Σx² + 10⁻⁶), queries also by K^-½), a decay gₜ ≤ 0 and a
//! rate βₜ in [0, 1]:
//!
//! ```text
//! S ← e^gₜ·S;   δₜ = βₜ(vₜ − Sᵀkₜ);   S ← S + kₜδₜᵀ;   oₜ = Sᵀqₜ
//! ```
//!
//! A key head serves the `value heads / key heads` consecutive value heads.
//!
//! # Chunks
//!
//! A loop over tokens multiplies matrices by vectors. A chunk of n = 64 tokens is a few products of matrices instead. With
//! c = cumsum(g) within the chunk, D_ij = e^(cᵢ − cⱼ) for i ≥ j and else 0, and S the state before the chunk:
//!
//! ```text
//! M = strictly lower(diag(β)·KKᵀ ⊙ D)       A = (I + M)⁻¹        P = QKᵀ ⊙ D        K̂ = diag(e^(cₙ − c))·K
//! N = A·diag(β)(V − diag(e^c)·KS)           O = diag(e^c)·QS + PN                   S′ = e^cₙ·S + K̂ᵀN
//! ```
//!
//! Only N and S′ depend on the chunk before, so all else is computed for 16 chunks at once. A is computed by blocks: two become
//! one of twice the size, [[A₁, 0], [−A₂M₂₁A₁, A₂]]; 512 matrices take 13 ms so, 39 ms by a triangular solve (two threads of a Xeon).
//!
//! Backward, from dO and dS′, with a chunk's S, N, A and P computed again and chunks in reverse:
//!
//! ```text
//! dN = PᵀdO + K̂dS′       R = AᵀdN       Y = −RSᵀ       F = −strictly lower(RNᵀ) ⊙ D       G = (dO·Nᵀ) ⊙ D
//! dS = e^cₙ·dS′ + Qᵀdiag(e^c)dO − Kᵀdiag(βe^c)R
//! dQ = G·K + diag(e^c)dO·Sᵀ
//! dK = GᵀQ + diag(e^(cₙ − c))·N·dS′ᵀ + diag(βe^c)Y + diag(β)F·K + Fᵀdiag(β)K
//! dV = diag(β)R          dβᵢ = ⟨Rᵢ, Vᵢ⟩ + e^cᵢ⟨Yᵢ, Kᵢ⟩ + ⟨Fᵢ, (KKᵀ)ᵢ⟩
//! ```
//!
//! The gradient of c has the sums of G ⊙ QKᵀ + diag(β)F ⊙ KKᵀ by rows less those by columns, e^cᵢ⟨(dO·Sᵀ)ᵢ, Qᵢ⟩ + βᵢe^cᵢ⟨Yᵢ, Kᵢ⟩ − ρᵢ
//! with ρᵢ = ⟨(N·dS′ᵀ)ᵢ, K̂ᵢ⟩, and for the last token Σρ + e^cₙ⟨dS′, S⟩; dg is its cumulative sum from the end of the chunk.
//!
//! # Documents
//!
//! A document of a packed row starts with S = 0. The factors D, e^c, e^(cₙ − c) and e^cₙ are 0 where a document starts between their two
//! tokens, so documents take no work of their own, and their boundaries may be known to the device alone.
//!
//! # Saved tensors, cost, precision
//!
//! Saved are the inputs as they come, and the states before every 16th chunk but the first: K·V/256 numbers of 4 bytes per token and value head, 8 kB
//! per token for 32 heads of 128 × 128 (a state for each chunk would be 33 kB, a graph of the operators over 200). Backward holds the states
//! of 16 chunks at a time. Forward multiplies about n·(n + 2V) + 3K·V numbers per token and value head, backward about 2.5 times as many.
//!
//! All is computed in fp32 for fp32, bf16 and fp16, in f64 for f64, and rounded once. Differences of c are taken before the exponential, and masked
//! before it, so that no decay overflows, and one of e⁻⁵⁰ or less is 0.
//!
//! [`gated_delta_rule`] is a node of the graph; [`gated_delta_step`] reads one token with a state, without a graph.

mod chunks;
mod function;
mod gradients;
mod step;

use runtime::autograd;
use runtime::{Error, Result};
use tch::{Kind, Tensor};

use crate::matmul::wide_kind;
use function::ChunkedRule;

const NAME: &str = "gated delta rule";

/// Added to the sum of squares of a query or key.
const NORM_EPS: f64 = 1e-6;

/// The inputs of the gated delta rule for rows of tokens.
#[derive(Debug, Clone, Copy)]
pub struct DeltaInputs<'a> {
    /// Queries `[b, t, key heads, key]`, not normalised.
    pub q: &'a Tensor,
    /// Keys `[b, t, key heads, key]`, not normalised.
    pub k: &'a Tensor,
    /// Values `[b, t, value heads, value]`, where the number of value heads is a multiple of the key heads'.
    pub v: &'a Tensor,
    /// Logarithms of decays `[b, t, value heads]`, at most 0, in fp32 or f64.
    pub g: &'a Tensor,
    /// Rates β `[b, t, value heads]`.
    pub beta: &'a Tensor,
}

/// The sizes of [`DeltaInputs`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    batch: i64,
    sequence: i64,
    key_heads: i64,
    /// Value heads of a key head.
    group: i64,
    key: i64,
    value: i64,
}

impl Sizes {
    fn of(inputs: &DeltaInputs<'_>) -> Result<Self> {
        let refuse = |name: &str, tensor: &Tensor, expected: String| {
            let reason = format!("`{name}` has shape {:?}; expected {expected}", tensor.size());
            Err(Error::invalid(NAME, reason))
        };
        let &[batch, sequence, key_heads, key] = inputs.k.size().as_slice() else {
            return refuse("k", inputs.k, "[batch, sequence, key heads, key]".to_owned());
        };
        if inputs.q.size() != inputs.k.size() {
            return refuse("q", inputs.q, format!("{:?}, as k", inputs.k.size()));
        }
        let value_heads = inputs.v.size().get(2).copied().unwrap_or(0);
        let (by_keys, value) = match inputs.v.size()[..] {
            [b, t, heads, value] => ([b, t] == [batch, sequence] && heads % key_heads.max(1) == 0, value),
            _ => (false, 0),
        };
        if !by_keys || [batch, sequence, key_heads, key, value_heads, value].iter().any(|&size| size < 1) {
            let expected = format!("[{batch}, {sequence}, a multiple of {key_heads}, value], none of them 0");
            return refuse("v", inputs.v, expected);
        }
        for (name, tensor) in [("g", inputs.g), ("beta", inputs.beta)] {
            if tensor.size() != [batch, sequence, value_heads] {
                return refuse(name, tensor, format!("[{batch}, {sequence}, {value_heads}]"));
            }
        }
        Ok(Self { batch, sequence, key_heads, group: value_heads / key_heads, key, value })
    }

    /// The shape of a state.
    fn state(&self) -> [i64; 4] {
        [self.batch, self.key_heads * self.group, self.key, self.value]
    }

    fn check_state(&self, state: &Tensor, kind: Kind) -> Result<()> {
        if state.size() != self.state() || state.kind() != kind {
            let reason = format!(
                "the state is {:?} {:?}; expected {kind:?} {:?}",
                state.kind(),
                state.size(),
                self.state()
            );
            return Err(Error::invalid(NAME, reason));
        }
        Ok(())
    }
}

/// Computes o `[b, t, value heads, value]` in v's dtype, and the state after the last token, `[b, value heads, key, value]` in fp32 (f64 for f64),
/// by chunks. `documents` `[b, t]`, int64, has the document of each token; a document starts with an empty state. `state` is that
/// before the first token, 0 if absent. Second derivatives are not supported.
///
/// ```
/// use kernels::delta_rule::{DeltaInputs, gated_delta_rule};
/// use tch::{Tensor, kind::FLOAT_CPU};
///
/// let q = Tensor::from_slice(&[2.0f32, 0.0]).view([1, 1, 1, 2]);
/// let v = Tensor::from_slice(&[3.0f32]).view([1, 1, 1, 1]);
/// let (g, beta) = (Tensor::zeros([1, 1, 1], FLOAT_CPU), Tensor::ones([1, 1, 1], FLOAT_CPU) * 0.5);
/// let (o, state) = gated_delta_rule(&DeltaInputs { q: &q, k: &q, v: &v, g: &g, beta: &beta }, None, None)?;
/// // k = (1, 0) and q = (1, 0)/√2 after normalisation.
/// assert!((o.double_value(&[0, 0, 0, 0]) - 1.5 / 2f64.sqrt()).abs() < 1e-5);
/// assert!((state.double_value(&[0, 0, 0, 0]) - 1.5).abs() < 1e-5);
/// # Ok::<(), runtime::Error>(())
/// ```
///
/// # Errors
/// Shapes or dtypes that do not match; errors of libtorch.
pub fn gated_delta_rule(
    inputs: &DeltaInputs<'_>,
    documents: Option<&Tensor>,
    state: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    let sizes = Sizes::of(inputs)?;
    if let Some(documents) = documents.filter(|ids| ids.size() != [sizes.batch, sizes.sequence]) {
        let reason = format!(
            "the documents have shape {:?}; expected {:?}",
            documents.size(),
            [sizes.batch, sizes.sequence]
        );
        return Err(Error::invalid(NAME, reason));
    }
    let kind = wide_kind(inputs.v.kind());
    if let Some(state) = state {
        sizes.check_state(state, kind)?;
    }
    let DeltaInputs { q, k, v, g, beta } = *inputs;
    let tensors: Vec<&Tensor> = [q, k, v, g, beta].into_iter().chain(state).collect();
    let function = ChunkedRule::new(sizes, kind, documents, state.is_some());
    let [o, state] = autograd::apply(function, &tensors)?;
    Ok((o, state))
}

/// Reads one token (t = 1): returns o `[b, 1, value heads, value]` in v's dtype, and the new state. Nothing is recorded.
///
/// # Errors
/// As [`gated_delta_rule`]; another number of tokens.
pub fn gated_delta_step(inputs: &DeltaInputs<'_>, state: &Tensor) -> Result<(Tensor, Tensor)> {
    let sizes = Sizes::of(inputs)?;
    sizes.check_state(state, wide_kind(inputs.v.kind()))?;
    if sizes.sequence != 1 {
        let reason = format!("a step of {} tokens; expected 1", sizes.sequence);
        return Err(Error::invalid(NAME, reason));
    }
    let _no_grad = tch::no_grad_guard();
    step::step(inputs, &sizes, state)
}

/// Returns x·rsqrt(Σx² + ε) of the last dimension, and the factor.
fn normalise(x: &Tensor) -> Result<(Tensor, Tensor)> {
    use runtime::ops::TryScalar;

    let squares = x.f_square()?.f_sum_dim_intlist([-1].as_slice(), true, x.kind())?;
    let factor = squares.try_add_scalar(NORM_EPS)?.f_rsqrt()?;
    Ok((x.f_mul(&factor)?, factor))
}
