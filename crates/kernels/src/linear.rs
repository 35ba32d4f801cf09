//! A linear layer, whose product a segment may keep.

use crate::processor::computes_on;
use runtime::Result;
use runtime::autograd::retain::{active, kept};
use runtime::autograd::{Backward, Forward, Function, apply};
use runtime::precision;
use runtime::tensor_layout::TensorLayout;
use smallvec::SmallVec;
use tch::{Device, Kind, Tensor};

use crate::gpu;
use crate::matmul::{MIN_DIMENSION, mm, mm_into};
use crate::nf4::Scales;

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
/// A weight in NF4 ([`nf4`](crate::nf4)) is frozen, and x and b may have any floating dtype.
///
/// # Errors
/// Errors of libtorch.
pub fn product(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let layouts = (TensorLayout::of(x)?, TensorLayout::of(weight)?, bias.map(TensorLayout::of).transpose()?);
    let (of_x, of_weight, of_bias) = (&layouts.0, &layouts.1, layouts.2.as_ref());
    if Scales::of(of_weight.kind()).is_some() && of_weight.size().len() == 2 {
        return crate::nf4::linear(x, weight, bias);
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
    let shape = of_x.size().to_vec();
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
    shape: Vec<i64>,
    /// The number of inputs: three with a bias.
    inputs: usize,
    /// Whether x was saved, and whether the weight was.
    saved: [bool; 2],
    /// Whether the products are those of [`crate::matmul`].
    by_mm: bool,
}

impl Linear {
    fn product(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        if !self.by_mm {
            return Ok(x.f_linear(weight, bias)?);
        }
        let (rows, out) = (matrix(x)?, weight.size()[0]);
        let mut product = Tensor::f_empty([rows.size()[0], out], (x.kind(), Device::Cpu))?;
        if let Some(bias) = bias {
            product.f_copy_(&bias.f_expand_as(&product)?)?;
        }
        mm_into(&mut product, &rows, &weight.f_tr()?, bias.is_some())?;
        let shape = [&self.shape[..self.shape.len() - 1], &[out]].concat();
        Ok(product.f_view(shape.as_slice())?)
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
        let grad = matrix(&grad)?;
        let by_mm = self.by_mm && !ctx.is_recorded();
        let product = |a: &Tensor, b: &Tensor| if by_mm { mm(a, b) } else { Ok(a.f_mm(b)?) };
        let x_gradient = || -> Result<Tensor> { Ok(product(&grad, &weight)?.f_reshape(&self.shape)?) };
        let weight_gradient = || -> Result<Tensor> { product(&grad.f_tr()?, &matrix(&x)?) };
        let bias_gradient = || Ok(grad.f_sum_dim_intlist([0].as_slice(), false, grad.kind())?);
        let gradients: [&dyn Fn() -> Result<Tensor>; 3] = [&x_gradient, &weight_gradient, &bias_gradient];
        let wanted = gradients.into_iter().take(self.inputs).enumerate();
        wanted.map(|(index, of)| ctx.needs_input_grad(index).then(of).transpose()).collect()
    }
}

/// Views `[…, width]` as rows.
fn matrix(x: &Tensor) -> Result<Tensor> {
    let width = x.size().last().copied().unwrap_or(1);
    Ok(x.f_reshape([-1, width])?)
}
