//! A frozen projection with low-rank terms, as one autograd function with a hand-written backward.
//!
//! Notation: n tokens (all leading dimensions of x as one), i and o the projection's widths, r a rank. Forward, with W `[o,
//! i]`, b `[o]`, and for each term A `[r, i]`, B `[o, r]`, a scale s, a dropout D (D(x) = k·M ⊙ x, M of zeros and ones, k =
//! 1/(1 − p)):
//!
//! - u = s·D(x)·Aᵀ `[n, r]`
//! - y = x·Wᵀ + b + Σ u·Bᵀ `[n, o]`
//!
//! Backward, with g = ∂L/∂y:
//!
//! - dB = gᵀ·u
//! - du = s·g·B `[n, r]`, the derivative by D(x)·Aᵀ
//! - dA = duᵀ·D(x)
//! - dx = g·W + Σ D(du·A), D being its own transpose
//! - dW = gᵀ·x and db = Σ g only if they are trained: a frozen base has no gradient, and no product for it.
//!
//! It keeps x, which neighbouring layers keep too (q, k and v share one), and u, r numbers per token. The mask is recomputed
//! from its seed ([`Mask`]). PyTorch with PEFT keeps x, D(x), D's mask and u; D(x) is as large as x for each projection.
//!
//! All products accumulate into one tensor per output: there is no `[n, o]` for the low-rank part, and no second `[n, i]` for
//! its gradient. Dropout needs one more `[n, i]`, first for the mask, then for D(x).
//!
//! Precision: with a base in bf16 or fp16, A and B, u, and the sums that become y and dx are in fp32 (f64 for f64), and each
//! sum is rounded once. A few rows, as in generation, are an exception: W is read in its dtype ([`matvec`]), or the product is
//! libtorch's in the base's dtype, because casting all of W would cost more than the product.
//!
//! W may be in NF4 ([`kernels::nf4`]): both products with it dequantize tiles of it, and everything else is as with a base of x's dtype.
//!
//! In a segment that keeps its products ([`runtime::autograd::retain`]), y and every u are kept, and recomputation runs no
//! products.

use kernels::dropout::Mask;
use kernels::matmul::{FEW, matvec, mm, mm_into, mm_scaled};
use kernels::nf4::{self, is_nf4, matrix_shape};
use runtime::autograd::{Backward, Forward, Function, apply, retain};
use tch::{Device, Kind, Tensor};

/// s·D(x)·Aᵀ·Bᵀ.
#[derive(Debug)]
pub(crate) struct Term<'a> {
    /// `[r, i]`, of [`wide_kind`].
    pub(crate) a: &'a Tensor,
    /// `[o, r]`, likewise.
    pub(crate) b: &'a Tensor,
    pub(crate) scale: f64,
    pub(crate) mask: Option<Mask>,
}

/// The dtype of adapters and of sums with a base of `kind`.
pub(crate) fn wide_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// Computes x·Wᵀ + b + Σ s·D(x)·Aᵀ·Bᵀ, `[…, i]` to `[…, o]`. x, W and b have one dtype, unless W is in NF4; the result has dtype `output`.
pub(crate) fn low_rank_linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    terms: &[Term<'_>],
    output: Kind,
) -> runtime::Result<Tensor> {
    let mut inputs = vec![x, weight];
    inputs.extend(bias);
    inputs.extend(terms.iter().flat_map(|term| [term.a, term.b]));
    let function = LowRank {
        shape: x.size(),
        bias: bias.map(Tensor::kind),
        terms: terms.iter().map(|term| (term.scale, term.mask)).collect(),
        kind: x.kind(),
        output,
        kept: Vec::new(),
    };
    let [y] = apply(function, &inputs)?;
    Ok(y)
}

struct LowRank {
    /// The shape of x.
    shape: Vec<i64>,
    /// The dtype of b.
    bias: Option<Kind>,
    /// Scale and mask of each term.
    terms: Vec<(f64, Option<Mask>)>,
    /// x's dtype.
    kind: Kind,
    output: Kind,
    /// The saved tensors, in order.
    kept: Vec<Kept>,
}

/// A saved tensor, with the index of its term.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    X,
    Weight,
    A(usize),
    B(usize),
    U(usize),
}

impl LowRank {
    fn index_of_a(&self, term: usize) -> usize {
        2 + usize::from(self.bias.is_some()) + 2 * term
    }

    fn input_count(&self) -> usize {
        self.index_of_a(self.terms.len())
    }

    fn products(&self, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        let (weight, bias) = (inputs[1], self.bias.map(|_| inputs[2]));
        let x = rows(inputs[0])?;
        let wide = wide_kind(x.kind());
        let mut out = base_product(&x, weight, bias, wide)?;
        let width = out.size()[1];
        let mut results = Vec::new();
        let x = if self.terms.is_empty() { x } else { x.f_to_kind(wide)? };
        for (term, &(scale, mask)) in self.terms.iter().enumerate() {
            let at = self.index_of_a(term);
            let (a, b) = (inputs[at], inputs[at + 1]);
            let u = match mask {
                Some(mask) => mm_scaled(&mask.apply(&x, 1.0)?, &a.f_tr()?, scale * mask.scale())?,
                None => mm_scaled(&x, &a.f_tr()?, scale)?,
            };
            mm_into(&mut out, &u, &b.f_tr()?, true)?;
            results.push(u);
        }
        let shape = [&self.shape[..self.shape.len() - 1], &[width]].concat();
        results.insert(0, out.f_to_kind(self.output)?.f_reshape(&shape)?);
        Ok(results)
    }
}

impl Function for LowRank {
    fn name(&self) -> &'static str {
        "low-rank linear"
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        let mut results = retain::kept(|| self.products(inputs))?;
        let us = results.split_off(1);
        let terms = 0..self.terms.len();
        let needs = |index: usize| ctx.needs_input_grad(index);
        let of_x = needs(0);
        let mut saved = Vec::new();
        if needs(1) || terms.clone().any(|term| needs(self.index_of_a(term))) {
            saved.push((Kept::X, inputs[0]));
        }
        if of_x {
            saved.push((Kept::Weight, inputs[1]));
        }
        for term in terms {
            let at = self.index_of_a(term);
            if of_x {
                saved.push((Kept::A(term), inputs[at]));
            }
            if of_x || needs(at) {
                saved.push((Kept::B(term), inputs[at + 1]));
            }
            if needs(at + 1) {
                saved.push((Kept::U(term), &us[term]));
            }
        }
        self.kept = saved.iter().map(|(kept, _)| *kept).collect();
        saved.into_iter().for_each(|(_, tensor)| ctx.save(tensor));
        Ok(results)
    }

    fn backward(
        &self,
        ctx: &mut Backward,
        grads: Vec<Option<Tensor>>,
    ) -> runtime::Result<Vec<Option<Tensor>>> {
        let mut result: Vec<Option<Tensor>> = (0..self.input_count()).map(|_| None).collect();
        let Some(grad) = grads.into_iter().next().flatten() else { return Ok(result) };
        let saved = ctx.take_saved();
        let find = |kept: Kept| {
            let at = self.kept.iter().position(|known| *known == kept);
            at.map(|at| &saved[at]).ok_or_else(|| {
                runtime::Error::invalid(
                    "low-rank linear",
                    format!("{kept:?} was not kept, but its gradient is wanted"),
                )
            })
        };
        let wanted = |index: usize| ctx.needs_input_grad(index);
        let of_x = wanted(0);

        let grad = rows(&grad)?;
        let wide = wide_kind(grad.kind());
        let grad_wide = grad.f_to_kind(wide)?;
        let options = (wide, grad.device());
        let inner = self.shape[self.shape.len() - 1];
        // The sum that becomes dx, once it has a term.
        let mut dx: Option<Tensor> = None;
        let mut undropped = Vec::new();
        for (term, &(scale, mask)) in self.terms.iter().enumerate() {
            let at = self.index_of_a(term);
            if wanted(at + 1) {
                let u = find(Kept::U(term))?;
                result[at + 1] = Some(mm(&grad_wide.f_tr()?, u)?);
            }
            if !(of_x || wanted(at)) {
                continue;
            }
            let factor = scale * mask.map_or(1.0, Mask::scale);
            let du = mm_scaled(&grad_wide, find(Kept::B(term))?, factor)?;
            let Some(mask) = mask else {
                if wanted(at) {
                    let x = rows(find(Kept::X)?)?.f_to_kind(wide)?;
                    result[at] = Some(mm(&du.f_tr()?, &x)?);
                }
                undropped.push((term, du));
                continue;
            };
            let mut kept = mask.keep(&[grad.size()[0], inner], options)?;
            if of_x {
                let mut part = mm(&du, find(Kept::A(term))?)?;
                let _ = part.f_mul_(&kept)?;
                dx = Some(match dx {
                    Some(mut sum) => sum.f_add_(&part)?,
                    None => part,
                });
            }
            if wanted(at) {
                let _ = kept.f_mul_(&rows(find(Kept::X)?)?)?;
                result[at] = Some(mm(&du.f_tr()?, &kept)?);
            }
        }
        if of_x {
            let accumulate = dx.is_some();
            let mut sum = match dx {
                Some(sum) => sum,
                None => Tensor::f_empty([grad.size()[0], inner], options)?,
            };
            base_gradient_into(&mut sum, &grad, find(Kept::Weight)?, accumulate)?;
            for (term, du) in &undropped {
                mm_into(&mut sum, du, find(Kept::A(*term))?, true)?;
            }
            result[0] = Some(sum.f_to_kind(self.kind)?.f_reshape(&self.shape)?);
        }
        if wanted(1) {
            let x = rows(find(Kept::X)?)?;
            let product = mm(&grad_wide.f_tr()?, &x.f_to_kind(wide)?)?;
            result[1] = Some(product.f_to_kind(x.kind())?);
        }
        if let Some(kind) = self.bias.filter(|_| wanted(2)) {
            let sum = grad_wide.f_sum_dim_intlist([0].as_slice(), false, wide)?;
            result[2] = Some(sum.f_to_kind(kind)?);
        }
        Ok(result)
    }
}

/// Computes x·Wᵀ + b in `wide`, `[n, i]` to `[n, o]`.
pub(crate) fn base_product(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    wide: Kind,
) -> runtime::Result<Tensor> {
    let count = x.size()[0];
    if count <= FEW {
        if let Some(product) = matvec(x, weight, bias)? {
            return Ok(product.f_to_kind(wide)?);
        }
        if weight.kind() != wide && !is_nf4(weight) {
            return Ok(x.f_linear(weight, bias)?.f_to_kind(wide)?);
        }
    }
    // One launch, which adds the bias to the product. (On a CPU, `mm_into` divides the product among the threads.)
    if let Some(bias) = bias.filter(|_| x.device().is_cuda() && weight.kind() == wide && x.kind() == wide) {
        return Ok(bias.f_addmm(x, &weight.f_tr()?)?);
    }
    let [width, _] = matrix_shape(weight).unwrap_or_default();
    let mut out = Tensor::f_empty([count, width], (wide, x.device()))?;
    if let Some(bias) = bias {
        out.f_copy_(&bias.f_expand_as(&out)?)?;
    }
    base_product_into(&mut out, x, weight, bias.is_some())?;
    Ok(out)
}

/// Computes x·Wᵀ into `out` `[n, o]`, or adds it.
pub(crate) fn base_product_into(
    out: &mut Tensor,
    x: &Tensor,
    weight: &Tensor,
    accumulate: bool,
) -> runtime::Result<()> {
    if is_nf4(weight) {
        return nf4::mm_into(out, x, weight, accumulate);
    }
    mm_into(out, x, &weight.f_tr()?, accumulate)
}

/// Computes g·W into `sum` `[n, i]`, or adds it.
pub(crate) fn base_gradient_into(
    sum: &mut Tensor,
    grad: &Tensor,
    weight: &Tensor,
    accumulate: bool,
) -> runtime::Result<()> {
    let wide = sum.kind();
    if is_nf4(weight) {
        nf4::mm_transposed_into(sum, &grad.f_to_kind(wide)?, weight, accumulate)
    } else if grad.kind() == weight.kind() || grad.device() == Device::Cpu {
        mm_into(sum, grad, weight, accumulate)
    } else {
        mm_into(sum, &grad.f_to_kind(wide)?, &weight.f_to_kind(wide)?, accumulate)
    }
}

/// Views `[…, width]` as `[n, width]`, also if n is 0.
pub(crate) fn rows(x: &Tensor) -> runtime::Result<Tensor> {
    let size = x.size();
    let (&width, leading) = size.split_last().unwrap_or((&1, &[]));
    Ok(x.f_reshape([leading.iter().product::<i64>(), width])?)
}

#[cfg(test)]
mod tests {
    use runtime::autograd::{GradcheckConfig, gradcheck};
    use runtime::random::Generator;
    use tch::kind;

    use super::*;

    /// Everything at once: a trained base, two terms with dropout and one without.
    #[test]
    fn derivatives_match_finite_differences() {
        let mut generator = Generator::new(5).unwrap();
        let shapes: [&[i64]; 9] =
            [&[2, 3, 5], &[4, 5], &[4], &[3, 5], &[4, 3], &[2, 5], &[4, 2], &[1, 5], &[4, 1]];
        let inputs: Vec<Tensor> = shapes
            .iter()
            .map(|shape| generator.normal(shape, kind::DOUBLE_CPU).unwrap().set_requires_grad(true))
            .collect();
        let masks =
            [Some(Mask { rate: 0.3, seed: 1.into() }), None, Some(Mask { rate: 0.5, seed: 2.into() })];
        let report = gradcheck(
            |inputs| {
                let terms: Vec<Term<'_>> = inputs[3..]
                    .chunks(2)
                    .zip(masks)
                    .map(|(pair, mask)| Term { a: &pair[0], b: &pair[1], scale: 0.7, mask })
                    .collect();
                let [x, weight, bias] = [&inputs[0], &inputs[1], &inputs[2]];
                Ok(vec![low_rank_linear(x, weight, Some(bias), &terms, Kind::Double)?])
            },
            &inputs.iter().collect::<Vec<_>>(),
            GradcheckConfig::default(),
        )
        .unwrap();
        let expected = 24 * (30 + 20 + 4 + 15 + 12 + 10 + 8 + 5 + 4);
        assert_eq!(report.compared, expected, "{report}");
    }
}
