//! DoRA: a low-rank change of direction, and a learned magnitude of each row (Liu et al., arXiv:2402.09353).
//!
//! With V = W + s·B·A `[o, i]`, the norms of its rows ν = ‖V‖ `[o]`, and a trained m `[o]`, initialised to ν:
//!
//! - y = (m/ν) ⊙ (x·Vᵀ) + b
//!
//! Backward treats ν as a constant, as in the paper and PEFT. V is never computed:
//!
//! - ν² = ‖W‖² + 2s·rowsum((W·Aᵀ) ⊙ B) + s²·rowsum((B·(A·Aᵀ)) ⊙ B)
//!
//! which takes one product `[o, i]·[i, r]` and tensors of r columns; ‖W‖² is computed once. (In every forward PEFT computes
//! s·B·A by a product with an identity matrix, then V, then its norms.) Further low-rank terms add their products with each
//! other.
//!
//! With dropout D, PEFT computes W's part from x, and DoRA's change from D(x): y = x·Wᵀ + b + (m/ν − 1) ⊙ D(x)·Wᵀ + (m/ν) ⊙
//! s·D(x)·Aᵀ·Bᵀ. This equals (x − D(x))·Wᵀ + b + (m/ν) ⊙ (D(x)·Vᵀ), which is how it is computed: two products with W, as in
//! PEFT.
//!
//! Products use [`low_rank_linear`]; other operations are libtorch's, whose graph keeps x·Vᵀ for m's gradient.

use runtime::nf4::{self, is_nf4};
use tch::{Kind, Tensor};

use crate::adapter::Adapter;
use crate::dropout::{Mask, dropped};
use crate::function::{Term, low_rank_linear, wide_kind};

/// Computes y for one adapter with a magnitude.
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

/// Returns ‖W‖² of each row, `[o]`, in fp32 (f64 for f64).
pub(crate) fn squared_norms(weight: &Tensor) -> runtime::Result<Tensor> {
    let wide = wide_kind(weight.kind());
    let of_rows = |rows: Tensor| rows.f_square()?.f_sum_dim_intlist([1].as_slice(), false, wide);
    if !is_nf4(weight) {
        return Ok(of_rows(weight.f_detach()?.f_to_kind(wide)?)?);
    }
    let [out, inner] = nf4::matrix_shape(weight).unwrap_or_default();
    let step = (nf4::TILE_BYTES / 4 / inner.max(1)).max(1);
    let tile = |start: i64| Ok(of_rows(nf4::dequantize_rows(weight, start..out.min(start + step), wide)?)?);
    let squares: Vec<Tensor> = (0..out).step_by(step as usize).map(tile).collect::<runtime::Result<_>>()?;
    Ok(Tensor::f_cat(&squares, 0)?)
}

/// Returns ν `[o]`. The caller disables gradients.
pub(crate) fn row_norms(weight: &Tensor, squares: &Tensor, terms: &[Term<'_>]) -> runtime::Result<Tensor> {
    let weight = weight.f_detach()?;
    let weight = if is_nf4(&weight) { weight } else { weight.f_to_kind(squares.kind())? };
    // W·Aᵀ `[o, r]`.
    let by_weight = |a: &Tensor| -> runtime::Result<Tensor> {
        if !is_nf4(&weight) {
            return Ok(weight.f_mm(&a.f_tr()?)?);
        }
        let mut product =
            Tensor::f_empty([a.size()[0], squares.size()[0]], (squares.kind(), weight.device()))?;
        nf4::mm_into(&mut product, a, &weight, false)?;
        Ok(product.f_tr()?)
    };
    // Offloading moves the weight to the device without these.
    let squares = squares.f_to_device(weight.device())?;
    let rows = |product: Tensor, b: &Tensor, scale: f64| -> runtime::Result<Tensor> {
        let kind: Kind = squares.kind();
        Ok(product.f_mul(b)?.f_sum_dim_intlist([1].as_slice(), false, kind)?.f_mul_scalar(scale)?)
    };
    let mut sum = squares.f_add_scalar(0.0)?;
    for (index, term) in terms.iter().enumerate() {
        sum = sum.f_add_(&rows(by_weight(term.a)?, term.b, 2.0 * term.scale)?)?;
        for (other_index, other) in terms.iter().enumerate().take(index + 1) {
            let twice = if other_index == index { 1.0 } else { 2.0 };
            let product = other.b.f_mm(&other.a.f_mm(&term.a.f_tr()?)?)?;
            sum = sum.f_add_(&rows(product, term.b, twice * term.scale * other.scale)?)?;
        }
    }
    // Rounding may make a row of norm zero slightly negative.
    Ok(sum.f_clamp_min_(0.0)?.f_sqrt_()?)
}
