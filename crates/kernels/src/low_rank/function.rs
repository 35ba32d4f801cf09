//! One projection, with sums in fp32: the form of CPUs.

use runtime::autograd::{Backward, Forward, Function, apply, retain};
use runtime::tensor_layout::TensorLayout;
use runtime::tensor_memory::Dense;
use smallvec::SmallVec;
use tch::{Kind, Tensor};

use super::base::{base_gradient_into, base_product};
use super::{Affine, in_kind, rows, with_rows, with_width};
use crate::dropout::Mask;
use crate::matmul::{Matrix, mm, mm_into, mm_scaled, wide_kind};
use crate::quantized::is_quantized;

/// See [`low_rank_linear`](super::low_rank_linear).
pub(super) fn apply_to(x: &Tensor, projection: &Affine<'_>) -> runtime::Result<Tensor> {
    let Affine { weight, bias, terms } = projection;
    let mut inputs: SmallVec<[&Tensor; 8]> = SmallVec::from_slice(&[x, *weight]);
    inputs.extend(*bias);
    inputs.extend(terms.iter().flat_map(|term| [term.a, term.b]));
    let layout = TensorLayout::of(x)?;
    let function = LowRank {
        shape: SmallVec::from_slice(layout.size()),
        bias: bias.map(Tensor::kind),
        terms: terms.iter().map(|term| (term.scale, term.mask)).collect(),
        kind: layout.kind(),
        kept: SmallVec::new(),
    };
    let [y] = apply(function, &inputs)?;
    Ok(y)
}

struct LowRank {
    /// The shape of x.
    shape: SmallVec<[i64; 4]>,
    /// The dtype of b.
    bias: Option<Kind>,
    /// Scale and mask of each term.
    terms: SmallVec<[(f64, Option<Mask>); 1]>,
    /// x's dtype.
    kind: Kind,
    /// The saved tensors, in order.
    kept: SmallVec<[Kept; 5]>,
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
        let x = with_rows(inputs[0])?;
        let wide = wide_kind(self.kind);
        let mut out = base_product(&x, weight, bias, wide)?;
        let mut results = Vec::with_capacity(1 + self.terms.len());
        let x = if self.terms.is_empty() || self.kind == wide { x } else { Dense::Copy(x.f_to_kind(wide)?) };
        for (term, &(scale, mask)) in self.terms.iter().enumerate() {
            let at = self.index_of_a(term);
            let (a, b) = (inputs[at], inputs[at + 1]);
            let (a, b) = (Matrix::from(a).transposed(), Matrix::from(b).transposed());
            let u = match mask {
                Some(mask) => mm_scaled(&mask.apply(&rows(&x)?, 1.0)?, a, scale * mask.scale())?,
                None => mm_scaled(Matrix::rows(&x), a, scale)?,
            };
            mm_into(&mut out, &u, b, true)?;
            results.push(u);
        }
        let out = in_kind(out, self.kind)?;
        let shape = with_width(&self.shape, TensorLayout::of(&out)?.size().last().copied().unwrap_or(0));
        results.insert(0, if x.dim() == self.shape.len() { out } else { out.f_view(&shape[..])? });
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
        let mut saved: SmallVec<[(Kept, &Tensor); 5]> = SmallVec::new();
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

        let grad = with_rows(&grad)?;
        let wide = wide_kind(self.kind);
        let cast = (self.kind != wide).then(|| grad.f_to_kind(wide)).transpose()?;
        let grad_wide = Matrix::rows(cast.as_ref().unwrap_or(&grad));
        let options = (wide, grad.device());
        let inner = self.shape[self.shape.len() - 1];
        // The sum that becomes dx, once it has a term.
        let mut dx: Option<Tensor> = None;
        let mut undropped = Vec::new();
        for (term, &(scale, mask)) in self.terms.iter().enumerate() {
            let at = self.index_of_a(term);
            if wanted(at + 1) {
                let u = find(Kept::U(term))?;
                result[at + 1] = Some(mm(grad_wide.transposed(), u)?);
            }
            if !(of_x || wanted(at)) {
                continue;
            }
            let factor = scale * mask.map_or(1.0, Mask::scale);
            let du = mm_scaled(grad_wide, find(Kept::B(term))?, factor)?;
            let Some(mask) = mask else {
                if wanted(at) {
                    let x = with_rows(find(Kept::X)?)?;
                    let x = if self.kind == wide { x } else { Dense::Copy(x.f_to_kind(wide)?) };
                    result[at] = Some(mm(Matrix::from(&du).transposed(), Matrix::rows(&x))?);
                }
                undropped.push((term, du));
                continue;
            };
            let mut kept = mask.keep(&[du.size()[0], inner], options)?;
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
                result[at] = Some(mm(Matrix::from(&du).transposed(), &kept)?);
            }
        }
        if of_x {
            let accumulate = dx.is_some();
            let mut sum = match dx {
                Some(sum) if self.shape.len() < 3 => sum,
                Some(sum) => sum.f_view(&self.shape[..])?,
                None if self.shape.len() == 1 => Tensor::f_empty([1, inner], options)?,
                None => Tensor::f_empty(&self.shape[..], options)?,
            };
            let weight = find(Kept::Weight)?;
            // A product with a quantized weight would cast the gradient to the sum's dtype once more.
            let of_base = cast.as_ref().filter(|_| is_quantized(weight)).unwrap_or(&grad);
            base_gradient_into(&mut sum, of_base, weight, accumulate)?;
            for (term, du) in &undropped {
                mm_into(&mut sum, du, find(Kept::A(*term))?, true)?;
            }
            let sum = in_kind(sum, self.kind)?;
            result[0] = Some(if self.shape.len() == 1 { sum.f_view(&self.shape[..])? } else { sum });
        }
        if wanted(1) {
            let x = rows(find(Kept::X)?)?;
            let product = mm(grad_wide.transposed(), &x.f_to_kind(wide)?)?;
            result[1] = Some(product.f_to_kind(x.kind())?);
        }
        if let Some(kind) = self.bias.filter(|_| wanted(2)) {
            let wide_rows = rows(cast.as_ref().unwrap_or(&grad))?;
            let sum = wide_rows.f_sum_dim_intlist([0].as_slice(), false, wide)?;
            result[2] = Some(sum.f_to_kind(kind)?);
        }
        Ok(result)
    }
}
