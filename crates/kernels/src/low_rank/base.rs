//! Products with a frozen weight, dense or quantized.

use runtime::Result;
use runtime::ops::fill_rows_;
use runtime::tensor_layout::TensorLayout;
use tch::{Device, Kind, Tensor};

use super::{in_kind, rows, with_width};
use crate::gpu;
use crate::matmul::{FEW, Matrix, is_matvec, matvec, mm_into};
use crate::quantized::{self, is_quantized, matrix_shape};

/// Computes x·Wᵀ + b as sums of dtype `kind`, x's or [`wide_kind`](crate::matmul::wide_kind) of it: `[…, i]` to `[…, o]`, for a matrix x or a
/// contiguous one. Up to [`FEW`] rows of a CPU are multiplied in the weight's dtype.
///
/// # Errors
/// As [`mm_into`].
pub fn base_product(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, kind: Kind) -> Result<Tensor> {
    let (of_x, of_weight) = (TensorLayout::of(x)?, TensorLayout::of(weight)?);
    let width = match of_weight.size() {
        &[width, _] if !is_quantized(weight) => width,
        _ => matrix_shape(weight).unwrap_or_default()[0],
    };
    let shape = with_width(of_x.size(), width);
    let count: i64 = shape[..shape.len().saturating_sub(1)].iter().product();
    if count <= FEW && !gpu::is_chosen(of_x.device()) {
        let few = if is_matvec(&of_weight) { matvec(&rows(x)?, weight, bias)? } else { None };
        let product = match few {
            Some(product) => Some(product),
            None if of_weight.kind() != kind && !is_quantized(weight) => Some(x.f_linear(weight, bias)?),
            None => None,
        };
        if let Some(product) = product {
            return Ok(in_kind(product, kind)?.f_view(&shape[..])?);
        }
    }
    let mut out = Tensor::f_empty(&shape[..], (kind, of_x.device()))?;
    if let Some(bias) = bias {
        fill_rows_(&mut out, bias)?;
    }
    base_product_into(&mut out, x, weight, bias.is_some())?;
    Ok(out)
}

/// Computes x·Wᵀ into `out` `[…, o]`, or adds it; both are matrices or contiguous.
///
/// # Errors
/// As [`mm_into`].
pub fn base_product_into(out: &mut Tensor, x: &Tensor, weight: &Tensor, accumulate: bool) -> Result<()> {
    if is_quantized(weight) {
        return quantized::mm_into(&mut rows(out)?, &rows(x)?, weight, accumulate);
    }
    mm_into(out, Matrix::rows(x), Matrix::from(weight).transposed(), accumulate)
}

/// Computes g·W into `sum` `[…, i]`, or adds it; both are matrices or contiguous. g has the weight's dtype or the sum's.
///
/// # Errors
/// As [`mm_into`].
pub fn base_gradient_into(sum: &mut Tensor, grad: &Tensor, weight: &Tensor, accumulate: bool) -> Result<()> {
    let kind = sum.kind();
    if is_quantized(weight) {
        quantized::mm_transposed_into(&mut rows(sum)?, &rows(grad)?.f_to_kind(kind)?, weight, accumulate)
    } else if grad.kind() == weight.kind() || grad.device() == Device::Cpu {
        mm_into(sum, Matrix::rows(grad), weight, accumulate)
    } else {
        mm_into(sum, Matrix::rows(&grad.f_to_kind(kind)?), &weight.f_to_kind(kind)?, accumulate)
    }
}
