//! A linear layer in fp8: e4m3 in forward, e5m2 for the gradient, one scale per tensor (Micikevicius et al.,
//! arXiv:2209.05433).
//!
//! A tensor t is quantized as q = cast(s·t) with s = m/max|t|, where m is the largest number of the dtype (448 for
//! e4m3, 57344 for e5m2). A product of two is (q₁·q₂)/(s₁·s₂), accumulated in fp32. Weights and activations use e4m3, which
//! has three bits of mantissa; gradients span more orders of magnitude and use e5m2. With the gradient d of y = x·Wᵀ + b:
//!
//! ∂L/∂x = fp8(d)·fp8(W), ∂L/∂W = fp8(d)ᵀ·fp8(x), ∂L/∂b = Σ d
//!
//! No clamp is needed although libtorch's casts do not saturate: |s·t| exceeds m by its rounding at most, which the cast rounds to m.
//! Quantization is two passes: one for the extremes, one that multiplies and casts. Backward needs x and W in fp8 and their scales:
//! half the bytes that bf16 saves.
//!
//! A device with fp8 products ([`product_kind`]) multiplies all three by `_scaled_mm`, which takes sizes that are multiples of 16: other
//! operands are quantized into matrices with zeros in further rows and columns. They add nothing to a sum, and the result is cut.
//! Elsewhere the same fp8 operands are multiplied in bf16, which has every number of both dtypes, with fp32 sums. So are those without
//! elements.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use kernels::matmul::mm_into;
use kernels::processor;
use runtime::autograd::{self, Backward, Forward, Function, retain};
use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

/// The lower bound of amax: a tensor of zeros is quantized to zeros.
const MIN_AMAX: f64 = 1e-12;
/// `_scaled_mm` takes sizes that are multiples of this.
const TILE: i64 = 16;

/// Returns the largest number of an fp8 dtype.
pub fn max_value(dtype: Kind) -> f64 {
    if dtype == Kind::Float8e5m2 { 57_344.0 } else { 448.0 }
}

/// Returns the dtype of the instructions that multiply fp8 operands on a device: [`Kind::Float8e4m3fn`] for all pairs of fp8 on a GPU that
/// has them (tried once per device), else [`Kind::BFloat16`], or [`Kind::Float`] on a CPU that multiplies bf16 no faster. Sums are in fp32
/// with each.
pub fn product_kind(device: Device) -> Kind {
    if is_native(device) {
        Kind::Float8e4m3fn
    } else if device.is_cuda() || processor::multiplies_into_fp32(Kind::BFloat16) {
        Kind::BFloat16
    } else {
        Kind::Float
    }
}

/// An fp8 tensor and its scale.
#[derive(Debug)]
pub struct Quantized {
    /// s·t, cast.
    pub values: Tensor,
    /// s: a scalar fp32 tensor on the device of `values`.
    pub scale: Tensor,
}

/// Quantizes a floating-point tensor to `dtype` (e4m3 or e5m2), scaled by its largest magnitude. Does not wait for the
/// device. If the tensor has an infinity or a NaN, every product with the result is NaN.
///
/// # Errors
/// Errors of libtorch.
pub fn quantize(tensor: &Tensor, dtype: Kind) -> runtime::Result<Quantized> {
    let values = Tensor::f_empty(tensor.size(), (dtype, tensor.device()))?;
    let scale = quantize_into(&values, tensor)?;
    Ok(Quantized { values, scale })
}

/// Quantizes a tensor into `values`, of its shape, and returns the scale.
fn quantize_into(values: &Tensor, tensor: &Tensor) -> runtime::Result<Tensor> {
    let tensor = tensor.f_detach()?;
    if tensor.numel() == 0 {
        return Ok(Tensor::try_full([0i64; 0], 1.0, (Kind::Float, tensor.device()))?);
    }
    let (least, largest) = tensor.f_aminmax(None, false)?;
    let amax = largest.f_maximum(&least.f_neg()?)?.f_to_kind(Kind::Float)?.try_clamp_min(MIN_AMAX)?;
    let scale = Tensor::from(max_value(values.kind()) as f32).f_div(&amax)?;
    // With a dimension, the scale makes the product one of fp32; a number would not.
    let _ = tensor.f_mul_out(values, &scale.f_view(vec![1i64; tensor.dim()].as_slice())?)?;
    Ok(scale)
}

/// Quantizes a matrix as [`quantize`], with zeros in rows and columns up to multiples of `tile`.
fn quantize_matrix(matrix: &Tensor, dtype: Kind, tile: i64) -> runtime::Result<Quantized> {
    let (rows, columns) = matrix.size2()?;
    let padded = [rows, columns].map(|size| (size + tile - 1) / tile * tile);
    if padded == [rows, columns] {
        return quantize(matrix, dtype);
    }
    let values = Tensor::f_zeros(padded, (dtype, matrix.device()))?;
    let scale = quantize_into(&values.f_narrow(0, 0, rows)?.f_narrow(1, 0, columns)?, matrix)?;
    Ok(Quantized { values, scale })
}

/// Returns x·Wᵀ + b in `dtype`, for x `[…, in]`, W `[out, in]` and b `[out]` of any floating-point dtype.
pub(super) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    dtype: Kind,
) -> runtime::Result<Tensor> {
    linear_by(is_native(x.device()), [Some(x), Some(weight), bias], dtype)
}

/// [`linear`] with x, W and perhaps b, by `_scaled_mm` if `native`.
fn linear_by(native: bool, inputs: [Option<&Tensor>; 3], dtype: Kind) -> runtime::Result<Tensor> {
    let bias = inputs[2].is_some();
    let inputs: Vec<&Tensor> = inputs.into_iter().flatten().collect();
    let function = Fp8Linear { native, dtype, bias, kinds: Vec::new(), x_shape: Vec::new() };
    let [y] = autograd::apply(function, &inputs)?;
    Ok(y)
}

struct Fp8Linear {
    /// Whether `_scaled_mm` multiplies.
    native: bool,
    dtype: Kind,
    bias: bool,
    /// The dtypes of the inputs and of their gradients.
    kinds: Vec<Kind>,
    x_shape: Vec<i64>,
}

impl Function for Fp8Linear {
    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        let (x, weight) = (inputs[0], inputs[1]);
        self.kinds = inputs.iter().map(|input| input.kind()).collect();
        self.x_shape = x.size();
        let width = x.size().last().copied().unwrap_or(1);
        let rows = x.f_reshape([-1, width])?;
        let out = weight.size()[0];
        let x8 = quantize_matrix(&rows, Kind::Float8e4m3fn, self.tile())?;
        let w8 = quantize_matrix(weight, Kind::Float8e4m3fn, self.tile())?;
        for tensor in [&x8.values, &x8.scale, &w8.values, &w8.scale] {
            ctx.save(tensor);
        }
        let shape = [&self.x_shape[..self.x_shape.len().saturating_sub(1)], &[out]].concat();
        let product = Product { size: [rows.size()[0], out], kind: self.dtype, fast: true };
        retain::kept(|| {
            let y = self.product(&x8, &w8.transposed()?, inputs.get(2).copied(), product)?;
            Ok(vec![y.f_reshape(shape)?])
        })
    }

    fn backward(
        &self,
        ctx: &mut Backward,
        grads: Vec<Option<Tensor>>,
    ) -> runtime::Result<Vec<Option<Tensor>>> {
        let Some(grad) = grads.into_iter().next().flatten() else {
            return Ok((0..2 + usize::from(self.bias)).map(|_| None).collect());
        };
        let mut saved = ctx.take_saved().into_iter();
        let mut next =
            || saved.next().ok_or_else(|| runtime::Error::invalid("fp8 linear", "a saved tensor is missing"));
        let x8 = Quantized { values: next()?, scale: next()? };
        let w8 = Quantized { values: next()?, scale: next()? };
        let width = grad.size().last().copied().unwrap_or(1);
        let grad = grad.f_reshape([-1, width])?;
        let g8 = quantize_matrix(&grad, Kind::Float8e5m2, self.tile())?;
        let inner = self.x_shape.last().copied().unwrap_or(1);
        let product = |size, index: usize| Product { size, kind: self.kinds[index], fast: false };
        let mut results = Vec::new();
        results.push(match ctx.needs_input_grad(0) {
            true => {
                let rows = self.product(&g8, &w8, None, product([grad.size()[0], inner], 0))?;
                Some(rows.f_reshape(&self.x_shape)?)
            }
            false => None,
        });
        results.push(match ctx.needs_input_grad(1) {
            true => Some(self.product(&g8.transposed()?, &x8, None, product([width, inner], 1))?),
            false => None,
        });
        if self.bias {
            results.push(match ctx.needs_input_grad(2) {
                true => {
                    let sum = grad.f_sum_dim_intlist([0].as_slice(), false, Kind::Float)?;
                    Some(sum.f_to_kind(self.kinds[2])?)
                }
                false => None,
            });
        }
        Ok(results)
    }
}

impl Quantized {
    fn transposed(&self) -> runtime::Result<Self> {
        Ok(Self { values: self.values.f_tr()?, scale: self.scale.shallow_clone() })
    }
}

/// The result of a product.
#[derive(Clone, Copy)]
struct Product {
    /// `[m, n]`, without the rows and columns of zeros.
    size: [i64; 2],
    kind: Kind,
    /// Whether the device may accumulate in less than fp32.
    fast: bool,
}

impl Fp8Linear {
    /// The number that the sizes of the operands are multiples of.
    fn tile(&self) -> i64 {
        if self.native { TILE } else { 1 }
    }

    /// Returns a `[m, k]` times b `[k, n]` plus the bias `[n]`.
    fn product(
        &self,
        a: &Quantized,
        b: &Quantized,
        bias: Option<&Tensor>,
        product: Product,
    ) -> runtime::Result<Tensor> {
        let Product { size: [rows, columns], kind, .. } = product;
        if !self.native || a.values.numel() == 0 || b.values.numel() == 0 {
            return in_bf16(a, b, bias, product);
        }
        // `_scaled_mm` wants a row-major left operand and a column-major right one.
        let left = a.values.f_contiguous()?;
        let right = b.values.f_tr()?.f_contiguous()?.f_tr()?;
        let (a_inverse, b_inverse) = (a.scale.f_reciprocal()?, b.scale.f_reciprocal()?);
        let padded = right.size()[1];
        let bias = bias.map(|bias| bias.f_to_kind(kind)?.f_constant_pad_nd([0, padded - columns]));
        let (bias, none) = (bias.transpose()?, None::<&Tensor>);
        let out = left.f_internal_scaled_mm(
            &right,
            &a_inverse,
            &b_inverse,
            bias.as_ref(),
            none,
            kind,
            product.fast,
        )?;
        if out.size() == [rows, columns] {
            return Ok(out);
        }
        // A copy: what follows reads dense rows, and the zeros' memory is freed.
        let mut dense = Tensor::f_empty([rows, columns], (kind, out.device()))?;
        dense.f_copy_(&out.f_narrow(0, 0, rows)?.f_narrow(1, 0, columns)?)?;
        Ok(dense)
    }
}

/// [`Fp8Linear::product`] of operands in bf16, exact but for the sums, which are in fp32.
fn in_bf16(a: &Quantized, b: &Quantized, bias: Option<&Tensor>, product: Product) -> runtime::Result<Tensor> {
    let Product { size: [rows, columns], kind, .. } = product;
    let operand = |quantized: &Quantized, size: [i64; 2]| {
        let values = quantized.values.f_narrow(0, 0, size[0])?.f_narrow(1, 0, size[1])?;
        values.f_to_kind(Kind::BFloat16)
    };
    let inner = a.values.size()[1].min(b.values.size()[0]);
    let mut out = Tensor::f_empty([rows, columns], (Kind::Float, a.values.device()))?;
    mm_into(&mut out, &operand(a, [rows, inner])?, &operand(b, [inner, columns])?, false)?;
    let mut out = out.f_div_(&a.scale.f_mul(&b.scale)?)?;
    if let Some(bias) = bias {
        let _ = out.f_add_(&bias.f_to_kind(Kind::Float)?)?;
    }
    Ok(out.f_to_kind(kind)?)
}

/// Returns whether the device has native fp8 products, tried once per device.
fn is_native(device: Device) -> bool {
    static TRIED: Mutex<BTreeMap<usize, bool>> = Mutex::new(BTreeMap::new());
    let Device::Cuda(index) = device else { return false };
    let mut tried = TRIED.lock().unwrap_or_else(PoisonError::into_inner);
    *tried.entry(index).or_insert_with(|| {
        let attempt = |kind: Kind| -> Result<Tensor, tch::TchError> {
            let values = Tensor::f_ones([16, 16], (Kind::Float, device))?.f_to_kind(Kind::Float8e4m3fn)?;
            let one = Tensor::f_ones([] as [i64; 0], (Kind::Float, device))?;
            let none = None::<&Tensor>;
            values.f_internal_scaled_mm(&values.f_tr()?, &one, &one, none, none, kind, true)
        };
        // Results of forward, and gradients of fp32 weights.
        [Kind::BFloat16, Kind::Float].into_iter().all(|kind| attempt(kind).is_ok())
    })
}

#[cfg(test)]
mod tests;
