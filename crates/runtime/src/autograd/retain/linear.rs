//! A linear layer with a product that a segment may keep.

use tch::Tensor;

use super::{active, kept};
use crate::autograd::function::{Backward, Forward, Function, apply};
use crate::error::Result;
use crate::nf4::is_nf4;

/// Computes x·Wᵀ + b over the last dimension: x `[…, in]`, W `[out, in]`, b `[out]`, of one dtype. This is libtorch's
/// operator; inside a segment that keeps its products, the same product with a hand-written backward:
///
/// ```text
/// ∂L/∂x = g·W    ∂L/∂W = gᵀ·x    ∂L/∂b = Σ g        for g = ∂L/∂y, rows flattened
/// ```
///
/// A weight in NF4 ([`nf4`](crate::nf4)) is frozen, and x and b may have any floating dtype.
///
/// # Errors
/// Those of libtorch.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if is_nf4(weight) {
        return crate::nf4::linear(x, weight, bias);
    }
    if !active() {
        return Ok(x.f_linear(weight, bias)?);
    }
    let mut inputs = vec![x, weight];
    inputs.extend(bias);
    Ok(apply(Linear { shape: x.size(), inputs: inputs.len(), saved: [false; 2] }, &inputs)?.remove(0))
}

struct Linear {
    /// The shape of x.
    shape: Vec<i64>,
    /// The number of inputs: three with a bias.
    inputs: usize,
    /// Whether x was saved, and whether the weight was.
    saved: [bool; 2],
}

impl Function for Linear {
    fn name(&self) -> String {
        "kept linear".to_owned()
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (x, weight) = (inputs[0], inputs[1]);
        // Each is needed for the other's gradient.
        self.saved = [ctx.needs_input_grad(1), ctx.needs_input_grad(0)];
        for (tensor, _) in [x, weight].into_iter().zip(self.saved).filter(|(_, saved)| *saved) {
            ctx.save(tensor);
        }
        kept(|| Ok(vec![x.f_linear(weight, inputs.get(2).copied())?]))
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let mut tensors = ctx.take_saved().into_iter();
        let [x, weight] =
            self.saved.map(|saved| if saved { tensors.next() } else { None }.unwrap_or_else(Tensor::new));
        let Some(grad) = grads.into_iter().next().flatten() else {
            return Ok((0..self.inputs).map(|_| None).collect());
        };
        let grad = matrix(&grad)?;
        let of_x = || -> Result<Tensor> { Ok(grad.f_mm(&weight)?.f_reshape(&self.shape)?) };
        let of_weight = || -> Result<Tensor> { Ok(grad.f_tr()?.f_mm(&matrix(&x)?)?) };
        let of_bias = || Ok(grad.f_sum_dim_intlist([0].as_slice(), false, grad.kind())?);
        let gradients: [&dyn Fn() -> Result<Tensor>; 3] = [&of_x, &of_weight, &of_bias];
        let wanted = gradients.into_iter().take(self.inputs).enumerate();
        wanted.map(|(index, of)| ctx.needs_input_grad(index).then(of).transpose()).collect()
    }
}

/// Views `[…, width]` as rows.
fn matrix(x: &Tensor) -> Result<Tensor> {
    let width = x.size().last().copied().unwrap_or(1);
    Ok(x.f_reshape([-1, width])?)
}
