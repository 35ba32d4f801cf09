//! Products with a frozen weight, dense or in NF4.

use runtime::Result;
use tch::{Device, Kind, Tensor};

use crate::gpu;
use crate::matmul::{FEW, matvec, mm_into};
use crate::nf4::{self, is_nf4, matrix_shape};

/// Computes x·Wᵀ + b as sums of dtype `kind`, x's or [`wide_kind`](crate::matmul::wide_kind) of it: `[n, i]` to `[n, o]`. Up to [`FEW`] rows
/// of a CPU are multiplied in the weight's dtype.
///
/// # Errors
/// As [`mm_into`].
pub fn base_product(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, kind: Kind) -> Result<Tensor> {
    let count = x.size()[0];
    if count <= FEW && !gpu::is_chosen(x.device()) {
        if let Some(product) = matvec(x, weight, bias)? {
            return Ok(product.f_to_kind(kind)?);
        }
        if weight.kind() != kind && !is_nf4(weight) {
            return Ok(x.f_linear(weight, bias)?.f_to_kind(kind)?);
        }
    }
    let [width, _] = matrix_shape(weight).unwrap_or_default();
    let mut out = Tensor::f_empty([count, width], (kind, x.device()))?;
    if let Some(bias) = bias {
        out.f_copy_(&bias.f_expand_as(&out)?)?;
    }
    base_product_into(&mut out, x, weight, bias.is_some())?;
    Ok(out)
}

/// Computes x·Wᵀ into `out` `[n, o]`, or adds it.
///
/// # Errors
/// As [`mm_into`].
pub fn base_product_into(out: &mut Tensor, x: &Tensor, weight: &Tensor, accumulate: bool) -> Result<()> {
    if is_nf4(weight) {
        return nf4::mm_into(out, x, weight, accumulate);
    }
    mm_into(out, x, &weight.f_tr()?, accumulate)
}

/// Computes g·W into `sum` `[n, i]`, or adds it. g has the weight's dtype or the sum's.
///
/// # Errors
/// As [`mm_into`].
pub fn base_gradient_into(sum: &mut Tensor, grad: &Tensor, weight: &Tensor, accumulate: bool) -> Result<()> {
    let kind = sum.kind();
    if is_nf4(weight) {
        nf4::mm_transposed_into(sum, &grad.f_to_kind(kind)?, weight, accumulate)
    } else if grad.kind() == weight.kind() || grad.device() == Device::Cpu {
        mm_into(sum, grad, weight, accumulate)
    } else {
        mm_into(sum, &grad.f_to_kind(kind)?, &weight.f_to_kind(kind)?, accumulate)
    }
}
