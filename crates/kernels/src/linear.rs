//! A linear layer, whose product a segment may keep.

use crate::processor::computes_on;
use runtime::Result;
use runtime::autograd::retain::{active, kept};
use runtime::autograd::{Backward, Forward, Function, apply};
use runtime::ops::fill_rows_;
use runtime::precision;
use runtime::profile::is_counting;
use runtime::tensor_layout::TensorLayout;
use smallvec::SmallVec;
use tch::{Device, Kind, Tensor};

use crate::gpu;
use crate::matmul::{MIN_DIMENSION, Matrix, mm, mm_into};
use crate::quantized::{self, is_quantized_layout};

/// Computes x·Wᵀ + b over the last dimension, in the dtypes of this thread's [`runtime::precision`] policy: x `[…, in]`, W `[out, in]`,
/// b `[out]`.
///
/// # Errors
/// Errors of the policy and of [`product`].
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    precision::linear(x, weight, bias, &product)
}

/// Computes x·Wᵀ + b over the last dimension: x `[…, in]`, W `[out, in]`, b `[out]`, of one dtype, with this backward:
///
/// ```text
/// ∂L/∂x = g·W    ∂L/∂W = gᵀ·x    ∂L/∂b = Σ g        for g = ∂L/∂y, rows flattened
/// ```
///
/// On the CPU, products of fp32, bf16 and fp16 with at least [`MIN_DIMENSION`] rows of x and of W are those of [`crate::matmul`]; all
/// others, and those of a backward that is recorded for a second derivative, are libtorch's. The graph has one node for the layer, except
/// for a trained weight whose products are libtorch's: then it is libtorch's composite.
///
/// A [`quantized`] weight is frozen, and x and b may have any floating dtype.
///
/// # Errors
/// Errors of libtorch.
pub fn product(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let layouts = (TensorLayout::of(x)?, TensorLayout::of(weight)?, bias.map(TensorLayout::of).transpose()?);
    let (of_x, of_weight, of_bias) = (&layouts.0, &layouts.1, layouts.2.as_ref());
    if is_quantized_layout(of_weight) {
        return quantized::linear(x, weight, bias);
    }
    let by_mm = is_by_mm(of_x, of_weight, of_bias);
    // Under a frozen weight, one node instead of the three of libtorch's composite, with the same products.
    let is_frozen = !of_weight.is_recorded() && of_bias.is_none_or(|bias| !bias.is_recorded());
    let needs_node = by_mm || active() || of_x.is_recorded() && is_frozen;
    if !needs_node {
        return Ok(x.f_linear(weight, bias)?);
    }
    let mut inputs: SmallVec<[&Tensor; 3]> = SmallVec::from_slice(&[x, weight]);
    inputs.extend(bias);
    let shape = SmallVec::from_slice(of_x.size());
    let function = Linear { shape, inputs: inputs.len(), saved: [false; 2], by_mm };
    let [y] = apply(function, &inputs)?;
    Ok(y)
}

/// Returns whether the products are those of [`crate::matmul`]. Operands that do not fit are left to libtorch, whose error names the reason.
fn is_by_mm(x: &TensorLayout, weight: &TensorLayout, bias: Option<&TensorLayout>) -> bool {
    let (shape, kind) = (x.size(), x.kind());
    let Some((&width, leading)) = shape.split_last() else { return false };
    let &[out, stored] = weight.size() else { return false };
    let on_cpu = |tensor: &TensorLayout| {
        tensor.device() == Device::Cpu && tensor.kind() == kind && tensor.is_strided()
    };
    computes_on(x.device())
        && !gpu::is_chosen(x.device())
        && matches!(kind, Kind::Float | Kind::BFloat16 | Kind::Half)
        && [Some(x), Some(weight), bias].into_iter().flatten().all(on_cpu)
        && width == stored
        && bias.is_none_or(|bias| bias.size() == [out])
        && width > 0
        && leading.iter().product::<i64>().min(out) >= MIN_DIMENSION
}

struct Linear {
    /// The shape of x.
    shape: SmallVec<[i64; 4]>,
    /// The number of inputs: three with a bias.
    inputs: usize,
    /// Whether x was saved, and whether the weight was.
    saved: [bool; 2],
    /// Whether the products are those of [`crate::matmul`].
    by_mm: bool,
}

impl Linear {
    fn product(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (of_x, of_weight) = (TensorLayout::of(x)?, TensorLayout::of(weight)?);
        if !self.by_mm && (bias.is_some() || !is_plain(&of_x, &of_weight)) {
            return Ok(x.f_linear(weight, bias)?);
        }
        let view = (!has_rows(&of_x)).then(|| matrix(x)).transpose()?;
        let mut shape = self.shape.clone();
        if let (Some(width), [out, _]) = (shape.last_mut(), of_weight.size()) {
            *width = *out;
        }
        let mut product = Tensor::f_empty(&shape[..], (of_x.kind(), Device::Cpu))?;
        if let Some(bias) = bias {
            fill_rows_(&mut product, bias)?;
        }
        let (x, weight) = (Matrix::rows(view.as_ref().unwrap_or(x)), Matrix::from(weight).transposed());
        mm_into(&mut product, x, weight, bias.is_some())?;
        Ok(product)
    }
}

impl Function for Linear {
    const TWICE_DIFFERENTIABLE: bool = true;

    fn name(&self) -> &'static str {
        "linear"
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (x, weight) = (inputs[0], inputs[1]);
        // Each is needed for the other's gradient.
        self.saved = [ctx.needs_input_grad(1), ctx.needs_input_grad(0)];
        for (tensor, _) in [x, weight].into_iter().zip(self.saved).filter(|(_, saved)| *saved) {
            ctx.save(tensor);
        }
        kept(|| Ok(vec![self.product(x, weight, inputs.get(2).copied())?]))
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let mut tensors = ctx.take_saved().into_iter();
        let [x, weight] =
            self.saved.map(|saved| if saved { tensors.next() } else { None }.unwrap_or_else(Tensor::new));
        let Some(grad) = grads.into_iter().next().flatten() else {
            return Ok((0..self.inputs).map(|_| None).collect());
        };
        let recorded = ctx.is_recorded();
        let by_mm = self.by_mm && !recorded;
        let of_grad = TensorLayout::of(&grad)?;
        let product = |a: &Tensor, b: &Tensor| if by_mm { mm(a, b) } else { Ok(a.f_mm(b)?) };
        let x_gradient = || -> Result<Tensor> {
            // A view, which the function before this one does not overwrite: `accounting` counts on it.
            if recorded || !is_plain(&of_grad, &TensorLayout::of(&weight)?) {
                return Ok(product(&matrix(&grad)?, &weight)?.f_reshape(&self.shape[..])?);
            }
            let mut sum = Tensor::f_empty(&self.shape[..], (of_grad.kind(), of_grad.device()))?;
            mm_into(&mut sum, Matrix::rows(&grad), &weight, false)?;
            Ok(sum)
        };
        let weight_gradient = || -> Result<Tensor> { product(&matrix(&grad)?.f_tr()?, &matrix(&x)?) };
        let bias_gradient = || Ok(matrix(&grad)?.f_sum_dim_intlist([0].as_slice(), false, of_grad.kind())?);
        let gradients: [&dyn Fn() -> Result<Tensor>; 3] = [&x_gradient, &weight_gradient, &bias_gradient];
        let wanted = gradients.into_iter().take(self.inputs).enumerate();
        wanted.map(|(index, of)| ctx.needs_input_grad(index).then(of).transpose()).collect()
    }
}

/// Returns whether the tensor is rows of a [`Matrix`] without a copy.
fn has_rows(x: &TensorLayout) -> bool {
    x.size().len() == 2 || x.size().len() > 2 && x.is_contiguous()
}

/// Returns whether [`mm_into`] multiplies by libtorch's operator, and without views of the operands: on a CPU in fp32 or f64, while no
/// counter has to see the operators of views.
fn is_plain(x: &TensorLayout, weight: &TensorLayout) -> bool {
    let (device, kind) = (x.device(), x.kind());
    let plain = |one: &TensorLayout| {
        one.is_contiguous() && one.size().len() > 1 && one.is_strided() && !one.is_neg() && one.kind() == kind
    };
    let rows = x.numel() as i64 / x.size().last().copied().unwrap_or(1).max(1);
    computes_on(device)
        && !gpu::is_chosen(device)
        && !is_counting()
        && weight.device() == device
        && matches!(kind, Kind::Float | Kind::Double)
        && [x, weight].into_iter().all(plain)
        && (kind == Kind::Double || rows < MIN_DIMENSION)
}

/// Views `[…, width]` as rows.
fn matrix(x: &Tensor) -> Result<Tensor> {
    let width = x.size().last().copied().unwrap_or(1);
    Ok(x.f_reshape([-1, width])?)
}
