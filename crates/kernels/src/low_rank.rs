//! Frozen projections with low-rank terms, each as one autograd function or several of one input as one.
//!
//! Notation: n tokens (all leading dimensions of x as one), i and o a projection's widths, r a rank. Forward, with W `[o,
//! i]`, b `[o]`, and for each term A `[r, i]`, B `[o, r]`, a scale s, a dropout D (D(x) = k·M ⊙ x, M of zeros and ones, k =
//! 1/(1 − p)):
//!
//! - u = s·D(x)·Aᵀ `[n, r]`
//! - y = x·Wᵀ + b + Σ u·Bᵀ `[n, o]`
//!
//! Backward, with g = ∂L/∂y:
//!
//! - dB = gᵀ·u
//! - du = s·g·B `[n, r]`, the derivative by D(x)·Aᵀ
//! - dA = duᵀ·D(x)
//! - dx = g·W + Σ D(du·A), D being its own transpose
//! - dW = gᵀ·x and db = Σ g only if they are trained: a frozen base has no gradient, and no product for it.
//!
//! It keeps x, which neighbouring layers keep too (q, k and v share one), and u, r numbers per token. The mask is recomputed
//! from its seed ([`Mask`]). PyTorch with PEFT keeps x, D(x), D's mask and u; D(x) is as large as x for each projection.
//!
//! All products accumulate into one tensor per output: there is no `[n, o]` for the low-rank part, and no second `[n, i]` for
//! its gradient. Dropout needs one more `[n, i]`, first for the mask, then for D(x).
//!
//! W may be [`quantized`](crate::quantized): both products with it dequantize tiles of it, and everything else is as with a base of x's dtype.
//!
//! In a segment that keeps its products ([`runtime::autograd::retain`]), y and every u are kept, and recomputation runs no
//! products.
//!
//! # Precision, with x in bf16 or fp16, and A and B in fp32
//!
//! [`gpu`] chooses one of two forms.
//!
//! **On a CPU** A and B, u, and the sums that become y and dx are in fp32 (f64 for f64), and each sum is rounded once. A few rows, as in
//! generation, are an exception: W is read in its dtype ([`matvec`](crate::matmul::matvec)), or the product is libtorch's in the base's
//! dtype, because casting all of W would cost more than the product.
//!
//! **On a GPU** every product multiplies operands in x's dtype on tensor cores, with accumulators in fp32, and nothing of x's size is cast.
//! A and B are rounded to x's dtype once per forward, and backward has the same roundings. With q for rounding to x's dtype:
//!
//! ```text
//! u = q(s·D(x)·q(A)ᵀ)     c = q(b + u·q(B)ᵀ)     y = q(c + x·Wᵀ)
//! dB = gᵀ·u               du = q(s·g·q(B))       dA = duᵀ·D(x)         dB and dA in fp32, not rounded
//! p = q(D(du·q(A)))       dx = q(p + g·W)        further terms add to c and p, rounded each time
//! ```
//!
//! The low-rank part comes first, so that its rounding is relative to it and not to y: with the unit roundoff ε (2⁻⁸ of bf16, 2⁻¹¹ of fp16)
//! and Δ = |s|·|D(x)|·|A|ᵀ·|B|ᵀ, y is within ε·(|y| + |b| + 4·Δ) of the exact one, to first order in ε and beside the accumulator's error. PyTorch
//! with PEFT under autocast rounds x·Wᵀ + b, u, u·Bᵀ, its product with s, and the sum.
//!
//! # Several projections of one input
//!
//! q, k and v, or gate and up, are functions of one x. [`low_rank_linears`] makes one node of them on a GPU: x is kept once; all A are
//! rounded into one matrix, all u are one product with it, and all dA and the low-rank part of dx are one product each (where no term has
//! dropout and the scales are equal); dx is one sum, to which W₁, W₂, … add in this order. For q, k and v that is 8 launches in forward
//! instead of 12, and 11 in backward instead of 17. On a CPU, where a launch costs nothing, each projection is its own node, so that the
//! gradients of its result are freed one by one, and bits and bytes are those of separate projections.
//!
//! The products with W stay one for each projection: weights that are loaded one by one have no common memory.

mod base;
mod function;
mod group;

pub use base::{base_gradient_into, base_product, base_product_into};

use runtime::tensor_layout::TensorLayout;
use runtime::tensor_memory::Dense;
use runtime::{Error, Result};
use smallvec::SmallVec;
use tch::{Kind, Tensor};

use crate::dropout::Mask;
use crate::gpu;

/// s·D(x)·Aᵀ·Bᵀ.
#[derive(Debug, Clone, Copy)]
pub struct Term<'a> {
    /// `[r, i]`, in fp32 (f64 for an x in f64).
    pub a: &'a Tensor,
    /// `[o, r]`, likewise.
    pub b: &'a Tensor,
    /// s.
    pub scale: f64,
    /// D.
    pub mask: Option<Mask>,
}

/// x·Wᵀ + b + Σ s·D(x)·Aᵀ·Bᵀ.
#[derive(Debug, Clone)]
pub struct Affine<'a> {
    /// W `[o, i]`, in x's dtype or quantized.
    pub weight: &'a Tensor,
    /// b `[o]`.
    pub bias: Option<&'a Tensor>,
    /// The low-rank terms.
    pub terms: Vec<Term<'a>>,
}

/// Computes x·Wᵀ + b + Σ s·D(x)·Aᵀ·Bᵀ, `[…, i]` to `[…, o]`, in x's dtype.
///
/// # Errors
/// Shapes and dtypes that do not match; errors of libtorch.
pub fn low_rank_linear(x: &Tensor, projection: &Affine<'_>) -> Result<Tensor> {
    if !gpu::is_chosen(x.device()) {
        return function::apply_to(x, projection);
    }
    let results = group::apply_to(x, std::slice::from_ref(projection))?;
    let [y] = <[Tensor; 1]>::try_from(results).map_err(|_| Error::invalid("low-rank linear", "no result"))?;
    Ok(y)
}

/// [`low_rank_linear`] of each projection of one x: on a GPU as one autograd function.
///
/// # Errors
/// As [`low_rank_linear`].
pub fn low_rank_linears(x: &Tensor, projections: &[Affine<'_>]) -> Result<Vec<Tensor>> {
    if gpu::is_chosen(x.device()) {
        return group::apply_to(x, projections);
    }
    projections.iter().map(|projection| function::apply_to(x, projection)).collect()
}

/// Views `[…, width]` as `[n, width]`, also if n is 0.
///
/// # Errors
/// Errors of libtorch.
pub fn rows(x: &Tensor) -> Result<Tensor> {
    let layout = TensorLayout::of(x)?;
    let (&width, leading) = layout.size().split_last().unwrap_or((&1, &[]));
    if leading.len() == 1 {
        return Ok(x.shallow_clone());
    }
    Ok(x.f_reshape([leading.iter().product::<i64>(), width])?)
}

/// Returns a tensor whose rows are a [`Matrix`](crate::matmul::Matrix): itself, or rows that are viewed or copied.
fn with_rows(x: &Tensor) -> Result<Dense<'_>> {
    let layout = TensorLayout::of(x)?;
    let is_matrix = layout.size().len() == 2 || layout.size().len() > 2 && layout.is_contiguous();
    Ok(if is_matrix { Dense::Same(x) } else { Dense::Copy(rows(x)?) })
}

/// Returns `[leading…, width]` for the leading dimensions of `shape`.
fn with_width(shape: &[i64], width: i64) -> SmallVec<[i64; 4]> {
    let mut shape = SmallVec::from_slice(shape);
    if let Some(last) = shape.last_mut() {
        *last = width;
    }
    shape
}

/// Returns `tensor` in `kind`, without a call if it has it.
fn in_kind(tensor: Tensor, kind: Kind) -> Result<Tensor> {
    if tensor.kind() == kind { Ok(tensor) } else { Ok(tensor.f_to_kind(kind)?) }
}

#[cfg(test)]
mod tests;
