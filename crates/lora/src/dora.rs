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
//! One autograd function. With f = m/ν, z = D(x)·Vᵀ and g = ∂L/∂y, the backward is
//!
//! - dm = Σ g ⊙ z / ν, the sum over tokens
//! - dV's part: with h = f ⊙ g and u = s·D(x)·Aᵀ, dB = hᵀ·u, du = s·h·B, dA = duᵀ·D(x)
//! - dx = h·W + du·A; with dropout D((h − g)·W + du·A) + g·W
//!
//! It keeps x, z `[n, o]` and u `[n, r]`: LoRA without z, which costs a third product to compute again (a segment that
//! recomputes does that). The mask and D(x) are computed again.
//!
//! On a CPU z, u and sums are in fp32 (f64 for f64), and y and dx are rounded once. On a GPU ([`kernels::gpu`]) they are in x's dtype, as
//! are A and B, and nothing of x's size is cast; dA, dB, dm and ν are in fp32. f is near 1, and f ⊙ z is computed as z + (f − 1) ⊙ z with
//! f − 1 rounded, so that a small change of m is not lost to the rounding of f.

use kernels::dropout::Mask;
use kernels::gpu;
use kernels::low_rank::{Term, base_gradient_into, base_product, base_product_into, rows};
use kernels::matmul::{mm, mm_into, mm_scaled, mm_widened, wide_kind};
use kernels::quantized::{self, is_quantized};
use runtime::autograd::{Backward, Forward, Function, apply, retain};
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use crate::adapter::Adapter;

/// Computes y for one adapter with a magnitude.
pub(crate) fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    squares: &Tensor,
    adapter: &Adapter,
    mask: Option<Mask>,
) -> runtime::Result<Tensor> {
    let terms = adapter.terms(None);
    let Some(magnitude) = &adapter.magnitude else {
        return Err(runtime::Error::invalid("DoRA", "the adapter has no magnitudes"));
    };
    let sums = if gpu::is_chosen(x.device()) { x.kind() } else { wide_kind(x.kind()) };
    let norms = {
        let _no_grad = tch::no_grad_guard();
        row_norms(weight, squares, &terms, Some(sums))?
    };
    let mut inputs = vec![x, weight, magnitude];
    inputs.extend(terms.iter().flat_map(|term| [term.a, term.b]));
    inputs.extend(bias);
    let scales = terms.iter().map(|term| term.scale).collect();
    let function = Dora { scales, mask, norms, sums, bias: bias.map(Tensor::kind), kept: Vec::new() };
    let [y] = apply(function, &inputs)?;
    Ok(y)
}

/// Inputs: x, W, m, then A and B of each term, then b if there is one.
struct Dora {
    scales: Vec<f64>,
    mask: Option<Mask>,
    /// ν.
    norms: Tensor,
    /// The dtype of z, u and sums: x's on a GPU, else fp32 or f64.
    sums: Kind,
    /// The dtype of b.
    bias: Option<Kind>,
    /// The terms whose u is saved: those that learn.
    kept: Vec<usize>,
}

const WEIGHT: usize = 1;
const MAGNITUDE: usize = 2;

/// The index of A; B follows.
fn a(term: usize) -> usize {
    3 + 2 * term
}

impl Dora {
    fn dropped(&self, x: &Tensor) -> runtime::Result<Tensor> {
        self.mask.map_or_else(|| Ok(x.shallow_clone()), |mask| mask.apply(x, mask.scale()))
    }

    /// Computes f ⊙ z, with f = m/ν in fp32, in the dtype of sums.
    fn scaled(&self, z: &Tensor, magnitude: &Tensor) -> runtime::Result<Tensor> {
        let factor = magnitude.f_div(&self.norms)?;
        if self.sums == wide_kind(self.sums) {
            return Ok(z.f_mul(&factor)?);
        }
        Ok(z.f_addcmul(z, &self.change(&factor)?)?)
    }

    /// Returns f − 1 in the dtype of sums.
    fn change(&self, factor: &Tensor) -> runtime::Result<Tensor> {
        Ok(factor.try_sub_scalar(1.0)?.f_to_kind(self.sums)?)
    }

    /// Computes z, and u of each term.
    fn products(&self, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        let x = self.dropped(&rows(inputs[0])?)?;
        let mut z = base_product(&x, inputs[WEIGHT], None, self.sums)?;
        let x = x.f_to_kind(self.sums)?;
        let mut us = Vec::new();
        for (term, &scale) in self.scales.iter().enumerate() {
            let [a, b] = [0, 1].map(|offset| inputs[a(term) + offset].f_to_kind(self.sums));
            let u = mm_scaled(&x, &a?.f_tr()?, scale)?;
            mm_into(&mut z, &u, &b?.f_tr()?, true)?;
            us.push(u);
        }
        us.insert(0, z);
        Ok(us)
    }
}

impl Function for Dora {
    fn name(&self) -> &'static str {
        "DoRA linear"
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        if ctx.needs_input_grad(WEIGHT) {
            return Err(runtime::Error::invalid(
                "DoRA",
                "the base's weight needs a gradient; it has to be frozen",
            ));
        }
        let results = retain::kept(|| self.products(inputs))?;
        let x = inputs[0];
        let mut y = self.scaled(&results[0], inputs[MAGNITUDE])?;
        if self.mask.is_some() {
            let x = rows(x)?;
            base_product_into(&mut y, &x.f_sub(&self.dropped(&x)?)?, inputs[WEIGHT], true)?;
        }
        if let Some(bias) = inputs.get(a(self.scales.len())) {
            y = y.f_add_(bias)?;
        }
        inputs.iter().take(a(self.scales.len())).for_each(|tensor| ctx.save(tensor));
        let (z, us) = (&results[0], &results[1..]);
        ctx.save(z);
        self.kept = (0..us.len()).filter(|term| ctx.needs_input_grad(a(*term) + 1)).collect();
        self.kept.iter().for_each(|term| ctx.save(&us[*term]));
        let shape = x.size();
        let shape = [&shape[..shape.len() - 1], &[results[0].size()[1]]].concat();
        Ok(vec![y.f_to_kind(x.kind())?.f_reshape(&shape)?])
    }

    fn backward(
        &self,
        ctx: &mut Backward,
        grads: Vec<Option<Tensor>>,
    ) -> runtime::Result<Vec<Option<Tensor>>> {
        let bias = a(self.scales.len());
        let mut result: Vec<Option<Tensor>> =
            (0..bias + usize::from(self.bias.is_some())).map(|_| None).collect();
        let Some(grad) = grads.into_iter().next().flatten() else { return Ok(result) };
        let mut saved = ctx.take_saved();
        let us = saved.split_off(bias + 1);
        let z = saved.remove(bias);
        let [x, weight, magnitude] = [&saved[0], &saved[WEIGHT], &saved[MAGNITUDE]];
        let wanted = |index: usize| ctx.needs_input_grad(index);
        let of_x = wanted(0);

        let grad = rows(&grad)?;
        let grad_sums = grad.f_to_kind(self.sums)?;
        if wanted(MAGNITUDE) {
            result[MAGNITUDE] = Some(of_tokens(&grad_sums.f_mul(&z)?)?.f_div_(&self.norms)?);
        }
        drop(z);
        if let Some(kind) = self.bias.filter(|_| wanted(bias)) {
            result[bias] = Some(of_tokens(&grad_sums)?.f_to_kind(kind)?);
        }
        let mut scaled = self.scaled(&grad_sums, magnitude)?;
        let mut of_terms = Vec::new();
        let mut x_sums: Option<Tensor> = None;
        for (term, &scale) in self.scales.iter().enumerate() {
            let at = a(term);
            if let Some(kept) = self.kept.iter().position(|kept| *kept == term).filter(|_| wanted(at + 1)) {
                result[at + 1] = Some(mm_widened(&scaled.f_tr()?, &us[kept])?);
            }
            if !(of_x || wanted(at)) {
                continue;
            }
            let du = mm_scaled(&scaled, &saved[at + 1].f_to_kind(self.sums)?, scale)?;
            if wanted(at) {
                if x_sums.is_none() {
                    x_sums = Some(self.dropped(&rows(x)?)?.f_to_kind(self.sums)?);
                }
                result[at] = x_sums.as_ref().map(|x| mm_widened(&du.f_tr()?, x)).transpose()?;
            }
            of_terms.push((at, du));
        }
        drop(x_sums);
        if of_x {
            let size = x.size();
            let inner = size[size.len() - 1];
            if self.mask.is_some() {
                // h − g, which in 16 bits would be lost to the rounding of h.
                scaled = match self.sums == wide_kind(self.sums) {
                    true => scaled.f_sub_(&grad_sums)?,
                    false => grad_sums.f_mul(&self.change(&magnitude.f_div(&self.norms)?)?)?,
                };
            }
            let mut sum = Tensor::f_empty([grad.size()[0], inner], (self.sums, grad.device()))?;
            base_gradient_into(&mut sum, &scaled, weight, false)?;
            for (at, du) in &of_terms {
                mm_into(&mut sum, du, &saved[*at].f_to_kind(self.sums)?, true)?;
            }
            if let Some(mask) = self.mask {
                sum = mask.apply(&sum, mask.scale())?;
                base_gradient_into(&mut sum, &grad, weight, true)?;
            }
            result[0] = Some(sum.f_to_kind(x.kind())?.f_reshape(&size)?);
        }
        Ok(result)
    }
}

/// Returns the sum over tokens of `[n, o]`, `[o]` in fp32 (f64 for f64): for 16 bits a product with ones, whose sums are in fp32.
fn of_tokens(tensor: &Tensor) -> runtime::Result<Tensor> {
    let kind = tensor.kind();
    if kind == wide_kind(kind) {
        return Ok(tensor.f_sum_dim_intlist([0].as_slice(), false, kind)?);
    }
    let ones = Tensor::f_ones([1, tensor.size()[0]], (kind, tensor.device()))?;
    Ok(mm_widened(&ones, tensor)?.f_view([-1])?)
}

/// Returns ‖W‖² of each row, `[o]`, in fp32 (f64 for f64).
pub(crate) fn squared_norms(weight: &Tensor) -> runtime::Result<Tensor> {
    let wide = wide_kind(weight.kind());
    let of_rows = |rows: Tensor| rows.f_square()?.f_sum_dim_intlist([1].as_slice(), false, wide);
    let weight = weight.f_detach()?;
    let [out, inner] = quantized::matrix_shape(&weight).unwrap_or_default();
    let step = (quantized::tile_bytes(weight.device()) / 4 / inner.max(1)).max(1);
    let tile = |start: i64| {
        let end = out.min(start + step);
        Ok(of_rows(match is_quantized(&weight) {
            true => quantized::dequantize_rows(&weight, start..end, wide)?,
            false => weight.f_narrow(0, start, end - start)?.f_to_kind(wide)?,
        })?)
    };
    let squares: Vec<Tensor> = (0..out).step_by(step as usize).map(tile).collect::<runtime::Result<_>>()?;
    Ok(Tensor::f_cat(&squares, 0)?)
}

/// Returns ν `[o]`, with W·Aᵀ by a product of operands in `products` on a GPU (in the dtype of `squares` by default) and a sum in fp32. The
/// caller disables gradients.
pub(crate) fn row_norms(
    weight: &Tensor,
    squares: &Tensor,
    terms: &[Term<'_>],
    products: Option<Kind>,
) -> runtime::Result<Tensor> {
    let weight = weight.f_detach()?;
    let kind: Kind = squares.kind();
    let products = products.unwrap_or(kind);
    // W·Aᵀ `[o, r]`.
    let by_weight = |a: &Tensor| -> runtime::Result<Tensor> {
        let options = (kind, weight.device());
        if is_quantized(&weight) {
            let mut product = Tensor::f_empty([a.size()[0], squares.size()[0]], options)?;
            quantized::mm_into(&mut product, &a.f_to_kind(products)?, &weight, false)?;
            return Ok(product.f_tr()?);
        }
        let mut product = Tensor::f_empty([squares.size()[0], a.size()[0]], options)?;
        // Only a CPU multiplies different dtypes.
        let on_cpu = !gpu::is_chosen(options.1);
        let cast = if on_cpu { weight.shallow_clone() } else { weight.f_to_kind(products)? };
        mm_into(&mut product, &cast, &a.f_to_kind(products)?.f_tr()?, false)?;
        Ok(product)
    };
    // Offloading moves the weight to the device without these.
    let squares = squares.f_to_device(weight.device())?;
    let rows = |product: Tensor, b: &Tensor, scale: f64| -> runtime::Result<Tensor> {
        Ok(product.f_mul(b)?.f_sum_dim_intlist([1].as_slice(), false, kind)?.try_mul_scalar(scale)?)
    };
    let mut sum = squares.try_add_scalar(0.0)?;
    for (index, term) in terms.iter().enumerate() {
        sum = sum.f_add_(&rows(by_weight(term.a)?, term.b, 2.0 * term.scale)?)?;
        for (other_index, other) in terms.iter().enumerate().take(index + 1) {
            let twice = if other_index == index { 1.0 } else { 2.0 };
            let product = mm(other.b, &mm(other.a, &term.a.f_tr()?)?)?;
            sum = sum.f_add_(&rows(product, term.b, twice * term.scale * other.scale)?)?;
        }
    }
    // Rounding may make a row of norm zero slightly negative.
    Ok(sum.try_clamp_min_(0.0)?.f_sqrt_()?)
}
