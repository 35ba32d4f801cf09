//! DoRA: a low-rank change of direction, and a learned length of each row (Liu et al., arXiv:2402.09353).
//!
//! With V = W + s·B·A `[o, i]` and the lengths of its rows ν = ‖V‖ `[o]`, m `[o]` learned, begun as ν:
//!
//! - y = (m/ν) ⊙ (x·Vᵀ) + b
//!
//! ν is a constant to backward, as the paper proposes and PEFT does. V is never made:
//!
//! - ν² = ‖W‖² + 2s·rowsum((W·Aᵀ) ⊙ B) + s²·rowsum((B·(A·Aᵀ)) ⊙ B)
//!
//! which is one product `[o, i]·[i, r]` and tensors of r columns; ‖W‖² is computed once. (PEFT makes s·B·A by a product with an
//! identity matrix, then V, then its norms, in every forward.) Further low-rank terms add their own products with each other.
//!
//! With dropout D, PEFT takes W's own part from x, and what DoRA adds to it from D(x):
//! y = x·Wᵀ + b + (m/ν − 1) ⊙ D(x)·Wᵀ + (m/ν) ⊙ s·D(x)·Aᵀ·Bᵀ. That is (x − D(x))·Wᵀ + b + (m/ν) ⊙ (D(x)·Vᵀ), which is how it is
//! computed: two products of W where PEFT has the same two.
//!
//! Products are [`low_rank_linear`]'s; what lies between them is libtorch's operators, whose graph keeps x·Vᵀ for m's gradient.

use tch::{Kind, Tensor};

use crate::adapter::Adapter;
use crate::dropout::{Mask, dropped};
use crate::function::{Term, low_rank_linear, wide_kind};

/// y of one adapter with a magnitude.
pub(crate) fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    squares: &Tensor,
    adapter: &Adapter,
    mask: Option<Mask>,
) -> runtime::Result<Tensor> {
    let kind = x.kind();
    let wide = wide_kind(kind);
    let terms = adapter.terms(None);
    let norms = {
        let _no_grad = tch::no_grad_guard();
        row_norms(weight, squares, &terms)?
    };
    let Some(magnitude) = &adapter.magnitude else {
        return Err(runtime::Error::invalid("DoRA", "the adapter has no magnitudes"));
    };
    let factor = magnitude.f_div(&norms)?;
    let y = match mask {
        None => {
            let scaled = low_rank_linear(x, weight, None, &terms, wide)?.f_mul(&factor)?;
            match bias {
                Some(bias) => scaled.f_add(&bias.f_to_kind(wide)?)?,
                None => scaled,
            }
        }
        Some(mask) => {
            let kept = dropped(x, mask)?;
            let of_rest = low_rank_linear(&x.f_sub(&kept)?, weight, bias, &[], wide)?;
            low_rank_linear(&kept, weight, None, &terms, wide)?.f_mul(&factor)?.f_add(&of_rest)?
        }
    };
    Ok(y.f_to_kind(kind)?)
}

/// ‖W‖² of each row, `[o]`, in fp32 (f64 for f64).
pub(crate) fn squared_norms(weight: &Tensor) -> runtime::Result<Tensor> {
    let wide = wide_kind(weight.kind());
    let weight = weight.f_detach()?.f_to_kind(wide)?;
    Ok(weight.f_square()?.f_sum_dim_intlist([1].as_slice(), false, wide)?)
}

/// ν `[o]`. The caller records nothing.
pub(crate) fn row_norms(weight: &Tensor, squares: &Tensor, terms: &[Term<'_>]) -> runtime::Result<Tensor> {
    let weight = weight.f_detach()?.f_to_kind(squares.kind())?;
    // Where the weight was brought from elsewhere they were left behind.
    let squares = squares.f_to_device(weight.device())?;
    let rows = |product: Tensor, b: &Tensor, scale: f64| -> runtime::Result<Tensor> {
        let kind: Kind = squares.kind();
        Ok(product.f_mul(b)?.f_sum_dim_intlist([1].as_slice(), false, kind)?.f_mul_scalar(scale)?)
    };
    let mut sum = squares.f_add_scalar(0.0)?;
    for (index, term) in terms.iter().enumerate() {
        sum = sum.f_add_(&rows(weight.f_mm(&term.a.f_tr()?)?, term.b, 2.0 * term.scale)?)?;
        for (other_index, other) in terms.iter().enumerate().take(index + 1) {
            let twice = if other_index == index { 1.0 } else { 2.0 };
            let product = other.b.f_mm(&other.a.f_mm(&term.a.f_tr()?)?)?;
            sum = sum.f_add_(&rows(product, term.b, twice * term.scale * other.scale)?)?;
        }
    }
    // Rounding may leave a row of no length a hair below zero.
    Ok(sum.f_clamp_min_(0.0)?.f_sqrt_()?)
}
