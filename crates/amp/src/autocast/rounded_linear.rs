//! A linear layer in a dtype without native products: operands in the dtype, products and sums in fp32, results rounded
//! once.
//!
//! y = round(x·Wᵀ + b), and with the gradient d of y, ∂L/∂x = round(d·W), ∂L/∂W = round(dᵀ·x), ∂L/∂b = round(Σ d). The tensors
//! saved for backward have the dtype too.

use kernels::matmul::{mm, mm_into};
use runtime::autograd::retain::kept;
use runtime::autograd::{self, Backward, Forward, Function};
use tch::Tensor;

/// Returns round(x·Wᵀ + b) for x `[…, in]`, W `[out, in]` and b `[out]`, all of one low-precision dtype on the CPU.
pub(super) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> runtime::Result<Tensor> {
    let mut inputs = vec![x, weight];
    inputs.extend(bias);
    let function = RoundedLinear { bias: bias.is_some(), shape: x.size(), saved: [false; 2] };
    let [y] = autograd::apply(function, &inputs)?;
    Ok(y)
}

struct RoundedLinear {
    bias: bool,
    /// The shape of x.
    shape: Vec<i64>,
    /// Whether x was saved, and whether the weight was.
    saved: [bool; 2],
}

/// Reshapes `[…, width]` to a matrix.
fn matrix(tensor: &Tensor) -> runtime::Result<Tensor> {
    let width = tensor.size().last().copied().unwrap_or(1);
    Ok(tensor.f_reshape([-1, width])?)
}

impl Function for RoundedLinear {
    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        let (x, weight) = (inputs[0], inputs[1]);
        // Each is needed for the other's gradient: a frozen weight keeps no input.
        self.saved = [ctx.needs_input_grad(1), ctx.needs_input_grad(0)];
        for (tensor, _) in [x, weight].into_iter().zip(self.saved).filter(|(_, saved)| *saved) {
            ctx.save(tensor);
        }
        let rows = matrix(x)?;
        let mut shape = x.size();
        if let Some(last) = shape.last_mut() {
            *last = weight.size()[0];
        }
        kept(|| {
            let mut y = Tensor::f_empty([rows.size()[0], weight.size()[0]], (x.kind(), x.device()))?;
            if let Some(bias) = inputs.get(2) {
                y.f_copy_(&bias.f_expand_as(&y)?)?;
            }
            mm_into(&mut y, &rows, &weight.f_tr()?, self.bias)?;
            Ok(vec![y.f_reshape(shape)?])
        })
    }

    fn backward(
        &self,
        ctx: &mut Backward,
        grads: Vec<Option<Tensor>>,
    ) -> runtime::Result<Vec<Option<Tensor>>> {
        let mut tensors = ctx.take_saved().into_iter();
        let [x, weight] =
            self.saved.map(|saved| if saved { tensors.next() } else { None }.unwrap_or_else(Tensor::new));
        let Some(grad) = grads.into_iter().next().flatten() else {
            return Ok((0..2 + usize::from(self.bias)).map(|_| None).collect());
        };
        let rows = matrix(&grad)?;
        let needs = |index: usize| ctx.needs_input_grad(index);
        let x_grad = needs(0).then(|| Ok::<_, runtime::Error>(mm(&rows, &weight)?.f_reshape(&self.shape)?));
        let weight_grad = needs(1).then(|| mm(&rows.f_tr()?, &matrix(&x)?));
        // A sum in fp32, as a product with ones is.
        let bias_grad = needs(2).then(|| {
            let ones = Tensor::f_ones([1, rows.size()[0]], (rows.kind(), rows.device()))?;
            Ok::<_, runtime::Error>(mm(&ones, &rows)?.f_view(-1)?)
        });
        let mut results = vec![x_grad.transpose()?, weight_grad.transpose()?];
        if self.bias {
            results.push(bias_grad.transpose()?);
        }
        Ok(results)
    }
}
