//! The two-layer MLP of GPT-2 with a hand-written backward.
//!
//! Notation as in [`function`](crate::function): n tokens, h hidden, f feed-forward. Forward, with W₁ `[f, h]`, W₂ `[h, f]`:
//!
//! - p = x·W₁ᵀ + b₁, a = φ(p) `[n, f]`, y = a·W₂ᵀ + b₂ `[n, h]`, φ being GELU or ReLU
//!
//! Backward, with D = ∂L/∂y:
//!
//! - dW₂ = Dᵀ·a, db₂ = Σ D, da = D·W₂
//! - dp = da ⊙ φ′(p)
//! - dW₁ = dpᵀ·x, db₁ = Σ dp, dx = dp·W₁
//!
//! A graph of operators keeps x, p and a: h + 2f elements per token. Here a is always recomputed elementwise, which leaves h +
//! f; [`CheckpointLevel::InputOnly`] also recomputes p, a seventh product after six, and leaves h. Products and activations are
//! libtorch's, called as its autograd calls them, so in fp32 values and gradients equal those of the operators bit for bit.
//!
//! A second derivative is an error. In low precision each product is computed in [`compute_kind`]'s dtype and rounded once.

use kernels::matmul::compute_kind;
use models::Activation;
use runtime::autograd::{Backward, Forward, Function, apply};
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use crate::error::Result;
use crate::level::CheckpointLevel;

/// The tensors of one projection: weight `[out, in]` and bias `[out]`.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// W.
    pub weight: &'a Tensor,
    /// b.
    pub bias: Option<&'a Tensor>,
}

/// Computes φ(x·W₁ᵀ + b₁)·W₂ᵀ + b₂ over the last dimension of x `[..., h]`.
///
/// [`CheckpointLevel::InputOnly`] keeps x; [`CheckpointLevel::SaveOne`] and [`CheckpointLevel::SaveGateUp`] keep x and the
/// first product; other levels are not supported.
///
/// # Errors
/// Errors of libtorch: shapes, dtypes or devices that do not match.
pub fn feed_forward(
    x: &Tensor,
    [up, down]: [Layer<'_>; 2],
    activation: Activation,
    level: CheckpointLevel,
) -> Result<Tensor> {
    let function = FeedForward {
        activation,
        keeps_product: level != CheckpointLevel::InputOnly,
        biases: [up.bias.is_some(), down.bias.is_some()],
        compute: compute_kind(x.device(), x.kind()),
        kept: Kept::default(),
    };
    let mut inputs = vec![x, up.weight, down.weight];
    inputs.extend(up.bias);
    inputs.extend(down.bias);
    let [y] = apply(function, &inputs)?;
    Ok(y)
}

/// The tensors that forward saved, besides the weights.
#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    x: bool,
    product: bool,
}

#[derive(Debug)]
struct FeedForward {
    activation: Activation,
    keeps_product: bool,
    biases: [bool; 2],
    compute: Kind,
    kept: Kept,
}

impl FeedForward {
    /// The indices of the inputs x, W₁, W₂, b₁, b₂; `None` for a missing bias.
    fn bias_indices(&self) -> [Option<usize>; 2] {
        let [first, second] = self.biases;
        [first.then_some(3), second.then_some(3 + usize::from(first))]
    }

    fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> runtime::Result<Tensor> {
        let kind = x.kind();
        let bias = bias.map(|bias| bias.f_to_kind(self.compute)).transpose()?;
        let product = x.f_to_kind(self.compute)?.f_linear(&weight.f_to_kind(self.compute)?, bias.as_ref())?;
        Ok(product.f_to_kind(kind)?)
    }

    /// Computes a·b in the computation's dtype, rounded to that of a.
    fn product(&self, a: &Tensor, b: &Tensor) -> runtime::Result<Tensor> {
        Ok(a.f_to_kind(self.compute)?.f_mm(&b.f_to_kind(self.compute)?)?.f_to_kind(a.kind())?)
    }

    fn activate(&self, product: &Tensor) -> runtime::Result<Tensor> {
        Ok(match self.activation {
            Activation::Relu => product.f_relu()?,
            Activation::Gelu => product.f_gelu("none")?,
            Activation::GeluTanh => product.f_gelu("tanh")?,
        })
    }

    fn activate_backward(&self, grad: &Tensor, product: &Tensor) -> runtime::Result<Tensor> {
        Ok(match self.activation {
            // The derivative of ReLU: the gradient where the result is above 0.
            Activation::Relu => grad.try_threshold_backward(product, 0.0)?,
            Activation::Gelu => product.f_gelu_backward(grad, "none")?,
            Activation::GeluTanh => product.f_gelu_backward(grad, "tanh")?,
        })
    }
}

fn rows(x: &Tensor) -> runtime::Result<Tensor> {
    let width = x.size().last().copied().unwrap_or(1);
    Ok(x.f_reshape([-1, width])?)
}

impl Function for FeedForward {
    fn name(&self) -> &'static str {
        if self.keeps_product {
            "feed-forward, keeping the first product"
        } else {
            "feed-forward, keeping the input"
        }
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        let bias = self.bias_indices().map(|index| index.map(|index| inputs[index]));
        let product = self.linear(inputs[0], inputs[1], bias[0])?;
        let y = self.linear(&self.activate(&product)?, inputs[2], bias[1])?;
        let needs = |index: usize| ctx.needs_input_grad(index);
        let below = needs(0) || needs(1) || self.bias_indices()[0].is_some_and(needs);
        // Only b₂'s gradient needs nothing from forward.
        let inner = below || needs(2);
        self.kept =
            Kept { x: needs(1) || inner && !self.keeps_product, product: inner && self.keeps_product };
        let Kept { x: keeps_x, product: keeps_product } = self.kept;
        ctx.save(inputs[1]);
        ctx.save(inputs[2]);
        if let Some(bias) = bias[0] {
            ctx.save(bias);
        }
        if keeps_x {
            ctx.save(inputs[0]);
        }
        if keeps_product {
            ctx.save(&product);
        }
        Ok(vec![y])
    }

    fn backward(
        &self,
        ctx: &mut Backward,
        grads: Vec<Option<Tensor>>,
    ) -> runtime::Result<Vec<Option<Tensor>>> {
        let count = 3 + self.biases.iter().filter(|bias| **bias).count();
        let mut result: Vec<Option<Tensor>> = (0..count).map(|_| None).collect();
        let Some(grad) = grads.into_iter().next().flatten() else { return Ok(result) };
        let mut saved = ctx.take_saved().into_iter();
        let lacking = || runtime::Error::invalid("feed-forward", "a tensor that backward needs was not kept");
        let (up, down) = (saved.next().ok_or_else(lacking)?, saved.next().ok_or_else(lacking)?);
        let bias = if self.biases[0] { saved.next() } else { None };
        let x = if self.kept.x { saved.next() } else { None };
        let product = if self.kept.product { saved.next() } else { None };
        let [up_bias, down_bias] = self.bias_indices();
        let wanted = |index: usize| ctx.needs_input_grad(index);
        let of_below = wanted(0) || wanted(1) || up_bias.is_some_and(wanted);

        let grad_nh = rows(&grad)?;
        if let Some(index) = down_bias.filter(|index| wanted(*index)) {
            result[index] = Some(grad_nh.f_sum_dim_intlist([0].as_slice(), false, grad.kind())?);
        }
        if !of_below && !wanted(2) {
            return Ok(result);
        }
        let product = match product {
            Some(product) => product,
            None => {
                let _recompute = runtime::profile::recompute();
                self.linear(x.as_ref().ok_or_else(lacking)?, &up, bias.as_ref())?
            }
        };
        if wanted(2) {
            let activated = rows(&self.activate(&product)?)?;
            result[2] = Some(self.product(&grad_nh.f_tr()?, &activated)?);
        }
        if !of_below {
            return Ok(result);
        }
        let grad_activated = self.product(&grad_nh, &down)?;
        let product = rows(&product)?;
        let grad_product = self.activate_backward(&grad_activated, &product)?;
        drop((grad_activated, product));
        if let Some(index) = up_bias.filter(|index| wanted(*index)) {
            result[index] = Some(grad_product.f_sum_dim_intlist([0].as_slice(), false, grad.kind())?);
        }
        if wanted(1) {
            let x = rows(x.as_ref().ok_or_else(lacking)?)?;
            result[1] = Some(self.product(&grad_product.f_tr()?, &x)?);
        }
        if wanted(0) {
            let size = [&grad.size()[..grad.dim() - 1], &[up.size()[1]]].concat();
            result[0] = Some(self.product(&grad_product, &up)?.f_reshape(&size)?);
        }
        Ok(result)
    }
}
