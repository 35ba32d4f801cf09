//! A linear layer in fp8: e4m3 in forward, e5m2 for the gradient, one scale per tensor (Micikevicius et al.,
//! arXiv:2209.05433).
//!
//! A tensor t is quantized as q = cast(clamp(s·t, ±m)) with s = m/max|t|, where m is the largest number of the dtype (448 for
//! e4m3, 57344 for e5m2). A product of two is (q₁·q₂)/(s₁·s₂), accumulated in fp32. Weights and activations use e4m3, which
//! has three bits of mantissa; gradients span more orders of magnitude and use e5m2. With the gradient d of y = x·Wᵀ + b:
//!
//! ∂L/∂x = fp8(d)·fp8(W), ∂L/∂W = fp8(d)ᵀ·fp8(x), ∂L/∂b = Σ d
//!
//! The clamp comes before the cast because libtorch's casts do not saturate. Backward needs x and W in fp8 and their scales:
//! half the bytes that bf16 saves.
//!
//! Native products (`_scaled_mm`) run on a CUDA device that supports them if all sizes are multiples of 16. Otherwise the
//! same fp8 operands are multiplied in fp32, which is exact for each product (4 + 4 bits of mantissa).

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use kernels::matmul::mm_into;
use runtime::autograd::{self, Backward, Forward, Function, retain};
use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

/// The lower bound of amax: a tensor of zeros is quantized to zeros.
const MIN_AMAX: f64 = 1e-12;

/// Returns the largest number of an fp8 dtype.
pub fn max_value(dtype: Kind) -> f64 {
    if dtype == Kind::Float8e5m2 { 57_344.0 } else { 448.0 }
}

/// An fp8 tensor and its scale.
#[derive(Debug)]
pub struct Quantized {
    /// s·t, clamped and cast.
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
    let max = max_value(dtype);
    let fp32 = tensor.f_to_kind(Kind::Float)?;
    if fp32.numel() == 0 {
        return Ok(Quantized {
            values: fp32.f_to_kind(dtype)?,
            scale: Tensor::try_full([0i64; 0], 1.0, (Kind::Float, fp32.device()))?,
        });
    }
    // As in torchao: the quotient in fp64, rounded to fp32 once.
    let amax = fp32.f_abs()?.f_max()?.f_to_kind(Kind::Double)?;
    let scale = amax.try_clamp_min(MIN_AMAX)?.f_reciprocal()?.try_mul_scalar(max)?.f_to_kind(Kind::Float)?;
    let values = fp32.f_mul(&scale)?.try_clamp(-max, max)?.f_to_kind(dtype)?;
    Ok(Quantized { values, scale })
}

/// Returns x·Wᵀ + b in `dtype`, for x `[…, in]`, W `[out, in]` and b `[out]` of any floating-point dtype.
pub(super) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    dtype: Kind,
) -> runtime::Result<Tensor> {
    let mut inputs = vec![x, weight];
    inputs.extend(bias);
    let function = Fp8Linear { dtype, bias: bias.is_some(), kinds: Vec::new(), x_shape: Vec::new() };
    let [y] = autograd::apply(function, &inputs)?;
    Ok(y)
}

struct Fp8Linear {
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
        let x8 = quantize(&x.f_reshape([-1, width])?, Kind::Float8e4m3fn)?;
        let w8 = quantize(weight, Kind::Float8e4m3fn)?;
        for tensor in [&x8.values, &x8.scale, &w8.values, &w8.scale] {
            ctx.save(tensor);
        }
        let mut shape = x.size();
        if let Some(last) = shape.last_mut() {
            *last = weight.size()[0];
        }
        retain::kept(|| {
            let mut y = product(&x8, &w8.transposed()?, Kind::Float, true)?;
            if let Some(bias) = inputs.get(2) {
                let _ = y.f_add_(&bias.f_to_kind(Kind::Float)?)?;
            }
            Ok(vec![y.f_to_kind(self.dtype)?.f_reshape(shape)?])
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
        let g8 = quantize(&grad, Kind::Float8e5m2)?;
        let mut results = Vec::new();
        results.push(match ctx.needs_input_grad(0) {
            true => Some(product(&g8, &w8, self.kinds[0], false)?.f_reshape(&self.x_shape)?),
            false => None,
        });
        results.push(match ctx.needs_input_grad(1) {
            true => Some(product(&g8.transposed()?, &x8, self.kinds[1], false)?),
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

/// Returns a `[m, k]` times b `[k, n]` in `kind`. `fast` allows the device to accumulate in less than fp32.
fn product(a: &Quantized, b: &Quantized, kind: Kind, fast: bool) -> runtime::Result<Tensor> {
    let (m, k, n) = (a.values.size()[0], a.values.size()[1], b.values.size()[1]);
    if is_native(a.values.device()) && [m, k, n].iter().all(|size| size % 16 == 0 && *size > 0) {
        // `_scaled_mm` wants a row-major left operand and a column-major right one.
        let left = a.values.f_contiguous()?;
        let right = b.values.f_tr()?.f_contiguous()?.f_tr()?;
        let (a_inverse, b_inverse) = (a.scale.f_reciprocal()?, b.scale.f_reciprocal()?);
        let none = None::<&Tensor>;
        let out =
            left.f_internal_scaled_mm(&right, &a_inverse, &b_inverse, none, none, Kind::BFloat16, fast)?;
        return Ok(out.f_to_kind(kind)?);
    }
    let fp32 = |t: &Tensor| t.f_to_kind(Kind::Float);
    let mut out = Tensor::f_empty([m, n], (Kind::Float, a.values.device()))?;
    mm_into(&mut out, &fp32(&a.values)?, &fp32(&b.values)?, false)?;
    let scale = a.scale.f_mul(&b.scale)?;
    Ok(out.f_div_(&scale)?.f_to_kind(kind)?)
}

/// Returns whether the device has native fp8 products, tried once per device.
fn is_native(device: Device) -> bool {
    static TRIED: Mutex<BTreeMap<usize, bool>> = Mutex::new(BTreeMap::new());
    let Device::Cuda(index) = device else { return false };
    let mut tried = TRIED.lock().unwrap_or_else(PoisonError::into_inner);
    *tried.entry(index).or_insert_with(|| {
        let attempt = || -> Result<Tensor, tch::TchError> {
            let values = Tensor::f_ones([16, 16], (Kind::Float, device))?.f_to_kind(Kind::Float8e4m3fn)?;
            let one = Tensor::f_ones([] as [i64; 0], (Kind::Float, device))?;
            let none = None::<&Tensor>;
            values.f_internal_scaled_mm(&values.f_tr()?, &one, &one, none, none, Kind::BFloat16, true)
        };
        attempt().is_ok()
    })
}
