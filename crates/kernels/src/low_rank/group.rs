//! Projections of one input as one autograd function, with sums in the input's dtype: the form of GPUs.
//!
//! The inputs of the function are x, then W, b if there is one, and A and B of each term, projection by projection. `r` is the sum of all
//! ranks: terms are windows of r in the joint u, du and A.

use runtime::Result;
use runtime::autograd::{Backward, Forward, Function, apply_any, retain};
use runtime::ops::foreach;
use tch::{Kind, Tensor};

use super::base::{base_gradient_into, base_product_into};
use super::{Affine, rows};
use crate::dropout::Mask;
use crate::matmul::{mm, mm_into, mm_scaled, mm_scaled_into, mm_widened};
use crate::quantized::matrix_shape;

/// See [`low_rank_linears`](super::low_rank_linears).
pub(super) fn apply_to(x: &Tensor, projections: &[Affine<'_>]) -> Result<Vec<Tensor>> {
    let mut inputs = vec![x];
    let mut parts = Vec::new();
    let mut rank = 0;
    for Affine { weight, bias, terms } in projections {
        let weight_index = inputs.len();
        inputs.push(weight);
        inputs.extend(bias);
        let mut part = Part { weight: weight_index, bias: bias.map(Tensor::kind), terms: Vec::new() };
        for term in terms {
            let width = term.a.size().first().copied().unwrap_or_default();
            let window = (rank, width);
            part.terms.push(Window { a: inputs.len(), scale: term.scale, mask: term.mask, window });
            rank += width;
            inputs.extend([term.a, term.b]);
        }
        parts.push(part);
    }
    let function =
        Group { shape: x.size(), kind: x.kind(), inputs: inputs.len(), rank, parts, kept: Kept::default() };
    apply_any(function, &inputs)
}

struct Group {
    /// The shape of x.
    shape: Vec<i64>,
    /// x's dtype.
    kind: Kind,
    /// The number of inputs.
    inputs: usize,
    /// r.
    rank: i64,
    parts: Vec<Part>,
    kept: Kept,
}

/// One projection.
struct Part {
    /// The index of W; b follows.
    weight: usize,
    /// The dtype of b.
    bias: Option<Kind>,
    terms: Vec<Window>,
}

/// One term.
#[derive(Clone, Copy)]
struct Window {
    /// The index of A; B follows.
    a: usize,
    scale: f64,
    mask: Option<Mask>,
    /// First index and length in r.
    window: (i64, i64),
}

impl Window {
    /// The factor of du and u beside the mask of zeros and ones.
    fn factor(&self) -> f64 {
        self.scale * self.mask.map_or(1.0, Mask::scale)
    }

    fn columns(&self, matrix: &Tensor) -> Result<Tensor> {
        part_of(matrix, 1, self.window)
    }

    fn rows(&self, matrix: &Tensor) -> Result<Tensor> {
        part_of(matrix, 0, self.window)
    }
}

/// Returns a window of a dimension, without a view if it is all of it.
fn part_of(matrix: &Tensor, dimension: i64, (start, length): (i64, i64)) -> Result<Tensor> {
    if matrix.size()[dimension as usize] == length {
        return Ok(matrix.shallow_clone());
    }
    Ok(matrix.f_narrow(dimension, start, length)?)
}

/// Which tensors are saved, in this order: x; W of each projection; A of all terms; B of each term; u of all terms.
#[derive(Clone, Copy, Default)]
struct Kept {
    x: bool,
    weights: bool,
    a: bool,
    b: bool,
    u: bool,
}

/// A of all terms `[r, i]`, and B of each `[o, r]`, in x's dtype.
struct Factors {
    a: Tensor,
    b: Vec<Tensor>,
}

impl Group {
    fn terms(&self) -> impl Iterator<Item = &Window> {
        self.parts.iter().flat_map(|part| &part.terms)
    }

    /// Whether one product serves all terms: none has dropout, and all have this factor.
    fn one_factor(&self) -> Option<f64> {
        let first = self.terms().next()?.scale;
        self.terms().all(|term| term.mask.is_none() && term.scale == first).then_some(first)
    }

    /// Rounds A and B to x's dtype, all in one launch.
    fn factors(&self, inputs: &[&Tensor]) -> Result<Factors> {
        let (mut targets, mut sources) = (Vec::new(), Vec::new());
        let mut in_kind = |source: &Tensor, target: Option<Tensor>| -> Result<Tensor> {
            let target = match target {
                Some(target) => target,
                None if source.kind() == self.kind => return Ok(source.shallow_clone()),
                None => Tensor::f_empty(source.size(), (self.kind, source.device()))?,
            };
            targets.push(target.shallow_clone());
            sources.push(source.shallow_clone());
            Ok(target)
        };
        let single = self.terms().count() <= 1;
        let joint = match self.terms().next() {
            Some(_) if !single => {
                let inner = self.shape.last().copied().unwrap_or(1);
                Tensor::f_empty([self.rank, inner], (self.kind, inputs[0].device()))?
            }
            Some(term) => in_kind(inputs[term.a], None)?,
            None => Tensor::new(),
        };
        let mut b = Vec::new();
        for term in self.terms() {
            if !single {
                let _ = in_kind(inputs[term.a], Some(term.rows(&joint)?))?;
            }
            b.push(in_kind(inputs[term.a + 1], None)?);
        }
        foreach::copy_(&targets, &sources)?;
        Ok(Factors { a: joint, b })
    }

    /// Computes u of all terms, if there are any, then y of each projection.
    fn products(&self, inputs: &[&Tensor], factors: &Factors) -> Result<Vec<Tensor>> {
        let x = rows(inputs[0])?;
        let mut results = Vec::new();
        if self.rank > 0 {
            results.push(self.low(&x, factors)?);
        }
        let mut b = factors.b.iter();
        for part in &self.parts {
            let (weight, bias) = (inputs[part.weight], part.bias.map(|_| inputs[part.weight + 1]));
            let [width, _] = matrix_shape(weight).unwrap_or_default();
            let mut y: Option<Tensor> = None;
            for (term, b) in part.terms.iter().zip(b.by_ref()) {
                let (u, b) = (term.columns(&results[0])?, b.f_tr()?);
                y = Some(match (y, bias) {
                    (Some(mut y), _) => {
                        mm_into(&mut y, &u, &b, true)?;
                        y
                    }
                    (None, Some(bias)) => self.in_kind(bias)?.f_addmm(&u, &b)?,
                    (None, None) => mm(&u, &b)?,
                });
            }
            let accumulate = y.is_some() || bias.is_some();
            let mut y = match (y, bias) {
                (Some(y), _) => y,
                (None, bias) => {
                    let mut y = Tensor::f_empty([x.size()[0], width], (self.kind, x.device()))?;
                    if let Some(bias) = bias {
                        y.f_copy_(&bias.f_expand_as(&y)?)?;
                    }
                    y
                }
            };
            base_product_into(&mut y, &x, weight, accumulate)?;
            results.push(match &self.shape[..] {
                [_, _] => y,
                [leading @ .., _] => y.f_view([leading, &[width]].concat().as_slice())?,
                [] => y,
            });
        }
        Ok(results)
    }

    /// Computes u of all terms, `[n, r]`.
    fn low(&self, x: &Tensor, factors: &Factors) -> Result<Tensor> {
        if let Some(factor) = self.one_factor() {
            return mm_scaled(x, &factors.a.f_tr()?, factor);
        }
        let all = Tensor::f_empty([x.size()[0], self.rank], (self.kind, x.device()))?;
        for term in self.terms() {
            let (mut u, a) = (term.columns(&all)?, term.rows(&factors.a)?.f_tr()?);
            match term.mask {
                Some(mask) => mm_scaled_into(&mut u, &mask.apply(x, 1.0)?, &a, term.factor())?,
                None => mm_scaled_into(&mut u, x, &a, term.factor())?,
            }
        }
        Ok(all)
    }

    fn in_kind(&self, tensor: &Tensor) -> Result<Tensor> {
        if tensor.kind() == self.kind { Ok(tensor.shallow_clone()) } else { Ok(tensor.f_to_kind(self.kind)?) }
    }
}

impl Function for Group {
    fn name(&self) -> &'static str {
        "low-rank linear"
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let factors = self.factors(inputs)?;
        let mut results = retain::kept(|| self.products(inputs, &factors))?;
        let us = results.drain(..usize::from(self.rank > 0)).next();

        let needs = |index: usize| ctx.needs_input_grad(index);
        let [of_a, of_b] = [0, 1].map(|offset| self.terms().any(|term| needs(term.a + offset)));
        let of_weight = self.parts.iter().any(|part| needs(part.weight));
        self.kept =
            Kept { x: of_a || of_weight, weights: needs(0), a: needs(0), b: needs(0) || of_a, u: of_b };
        if self.kept.x {
            ctx.save(inputs[0]);
        }
        if self.kept.weights {
            self.parts.iter().for_each(|part| ctx.save(inputs[part.weight]));
        }
        if self.kept.a && self.rank > 0 {
            ctx.save(&factors.a);
        }
        if self.kept.b {
            factors.b.iter().for_each(|b| ctx.save(b));
        }
        us.iter().filter(|_| self.kept.u).for_each(|us| ctx.save(us));
        Ok(results)
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let mut result: Vec<Option<Tensor>> = (0..self.inputs).map(|_| None).collect();
        if grads.iter().all(Option::is_none) {
            return Ok(result);
        }
        let saved = self.take(ctx)?;
        let wanted = |index: usize| ctx.needs_input_grad(index);
        let grads: Vec<Option<Tensor>> =
            grads.iter().map(|grad| grad.as_ref().map(rows).transpose()).collect::<Result<_>>()?;

        // du of all terms, dB of each, and the gradients of a trained base.
        let du = self.low_gradients(&saved, &grads, &mut result, &wanted)?;
        for (part, grad) in self.parts.iter().zip(&grads) {
            let Some(grad) = grad else { continue };
            if wanted(part.weight) {
                result[part.weight] = Some(mm(&grad.f_tr()?, &rows(&saved.x)?)?);
            }
            if let Some(kind) = part.bias.filter(|_| wanted(part.weight + 1)) {
                let sum = grad.f_sum_dim_intlist([0].as_slice(), false, self.kind)?;
                result[part.weight + 1] = Some(sum.f_to_kind(kind)?);
            }
        }

        // dA of each term.
        let trained = |term: &Window| wanted(term.a);
        if let (Some(du), true) = (&du, self.terms().any(trained)) {
            let x = rows(&saved.x)?;
            if self.one_factor().is_some() {
                let all = mm_widened(&du.f_tr()?, &x)?;
                for term in self.terms().filter(|term| trained(term)) {
                    result[term.a] = Some(term.rows(&all)?);
                }
            } else {
                for term in self.terms().filter(|term| trained(term)) {
                    let dropped =
                        term.mask.map_or_else(|| Ok(x.shallow_clone()), |mask| mask.apply(&x, 1.0))?;
                    result[term.a] = Some(mm_widened(&term.columns(du)?.f_tr()?, &dropped)?);
                }
            }
        }

        // dx: the low-rank part, then that of each weight.
        if wanted(0) {
            let mut sum = du.map(|du| self.low_input_gradient(&du, &saved.a)).transpose()?;
            let with_grads = grads.iter().zip(&saved.weights);
            for (grad, weight) in with_grads.filter_map(|(grad, weight)| Some((grad.as_ref()?, weight))) {
                let accumulate = sum.is_some();
                let mut dx = match sum {
                    Some(sum) => sum,
                    None => Tensor::f_empty([grad.size()[0], self.inner()], (self.kind, grad.device()))?,
                };
                base_gradient_into(&mut dx, grad, weight, accumulate)?;
                sum = Some(dx);
            }
            result[0] = sum.map(|sum| sum.f_reshape(&self.shape)).transpose()?;
        }
        Ok(result)
    }
}

/// The saved tensors; undefined or empty where nothing was saved.
struct Saved {
    x: Tensor,
    weights: Vec<Tensor>,
    a: Tensor,
    b: Vec<Tensor>,
    us: Tensor,
}

impl Group {
    fn inner(&self) -> i64 {
        self.shape.last().copied().unwrap_or(1)
    }

    fn take(&self, ctx: &mut Backward) -> Result<Saved> {
        let mut tensors = ctx.take_saved().into_iter();
        let mut one = |is_kept: bool| is_kept.then(|| tensors.next()).flatten().unwrap_or_else(Tensor::new);
        let count = self.terms().count();
        let x = one(self.kept.x);
        let weights = self.parts.iter().map(|_| one(self.kept.weights)).collect();
        let a = one(self.kept.a && count > 0);
        let b = (0..count).map(|_| one(self.kept.b)).collect();
        let us = one(self.kept.u);
        Ok(Saved { x, weights, a, b, us })
    }

    /// Computes du of all terms, `[n, r]`, for the gradients of x and of A, and dB of each.
    fn low_gradients(
        &self,
        saved: &Saved,
        grads: &[Option<Tensor>],
        result: &mut [Option<Tensor>],
        wanted: &dyn Fn(usize) -> bool,
    ) -> Result<Option<Tensor>> {
        let needs_du = self.rank > 0 && self.kept.b && (wanted(0) || self.terms().any(|term| wanted(term.a)));
        let Some(first) = grads.iter().flatten().next() else { return Ok(None) };
        let options = (self.kind, first.device());
        let all = needs_du.then(|| Tensor::f_empty([first.size()[0], self.rank], options)).transpose()?;
        let mut b = saved.b.iter();
        for (part, grad) in self.parts.iter().zip(grads) {
            for (term, b) in part.terms.iter().zip(b.by_ref()) {
                let mut du = all.as_ref().map(|all| term.columns(all)).transpose()?;
                match (grad, &mut du) {
                    (Some(grad), Some(du)) => mm_scaled_into(du, grad, b, term.factor())?,
                    (None, Some(du)) => drop(du.f_zero_()?),
                    _ => {}
                }
                if let (Some(grad), true) = (grad, wanted(term.a + 1)) {
                    result[term.a + 1] = Some(mm_widened(&grad.f_tr()?, &term.columns(&saved.us)?)?);
                }
            }
        }
        Ok(all)
    }

    /// Computes Σ D(du·A), `[n, i]`; D's factor is in du.
    fn low_input_gradient(&self, du: &Tensor, a: &Tensor) -> Result<Tensor> {
        if self.terms().all(|term| term.mask.is_none()) {
            return mm(du, a);
        }
        let mut sum: Option<Tensor> = None;
        // Terms with dropout need a tensor of their own; the others add to the sum.
        let (dropped, others): (Vec<&Window>, Vec<&Window>) =
            self.terms().partition(|term| term.mask.is_some());
        for (term, mask) in dropped.iter().filter_map(|term| Some((term, term.mask?))) {
            let part = mask.apply(&mm(&term.columns(du)?, &term.rows(a)?)?, 1.0)?;
            sum = Some(match sum {
                Some(mut sum) => sum.f_add_(&part)?,
                None => part,
            });
        }
        let mut sum = match sum {
            Some(sum) => sum,
            None => Tensor::f_zeros([du.size()[0], self.inner()], (self.kind, du.device()))?,
        };
        for term in others {
            mm_into(&mut sum, &term.columns(du)?, &term.rows(a)?, true)?;
        }
        Ok(sum)
    }
}
