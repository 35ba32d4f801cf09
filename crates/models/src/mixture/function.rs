//! The experts of a mixture as one function. The mathematics is in the [module above](super).

use std::sync::Arc;

use kernels::low_rank::{base_gradient_into, base_product_into};
use kernels::matmul::{mm, wide_kind};
use kernels::quantized::{is_quantized, matrix_shape};
use kernels::swiglu::{self as fused, Clamp};
use runtime::autograd::{Backward, Forward, Function};
use runtime::ops::fill_rows_;
use runtime::{Error, Result};
use tch::{Kind, Tensor};

use super::Routing;
use super::low_rank::{self, ExpertTensor, TermGradients, Terms, in_kind};
use super::source::{ExpertLoads, ExpertSource, Resident};

/// Index of x, of the weights of the slots, and of the first expert's matrices, among the inputs.
const X: usize = 0;
const WEIGHTS: usize = 1;
const MATRICES: usize = 2;

/// Inputs: x `[n, h]`, the weights of the slots `[n, k]`, and for each expert that has rows its matrices gate, up `[i, h]` and down
/// `[h, i]`, dense in x's dtype or in NF4, unless a source loads them; with a clamp then for each its biases, `[i]`, `[i]` and `[h]`; then
/// A and B of each low-rank term. Output: `[n, h]`.
pub(super) struct Experts {
    routing: Routing,
    source: Option<Arc<dyn ExpertSource>>,
    terms: Terms,
    /// The numbers of the activation of experts with biases.
    clamp: Option<Clamp>,
    /// Whether x was saved: if a matrix that multiplies it is trained.
    x_was_kept: bool,
}

impl Experts {
    pub(super) fn new(
        routing: Routing,
        source: Option<Arc<dyn ExpertSource>>,
        clamp: Option<Clamp>,
        terms: Terms,
    ) -> Self {
        Self { routing, source, terms, clamp, x_was_kept: false }
    }

    /// The number of the inputs before the biases.
    fn biases(&self) -> usize {
        MATRICES + if self.source.is_some() { 0 } else { 3 * self.routing.ranges().len() }
    }

    /// The number of the inputs before the low-rank terms.
    fn terms(&self) -> usize {
        self.biases() + if self.clamp.is_some() { 3 * self.routing.ranges().len() } else { 0 }
    }

    /// The inputs' number.
    fn inputs(&self) -> usize {
        self.terms() + 2 * self.terms.count()
    }

    /// Returns an expert by its index among those that have rows.
    fn expert(&self, number: usize) -> usize {
        self.routing.ranges()[number].0
    }

    /// The dtype of the products that a term adds to, of tokens of this dtype.
    fn kind_of(&self, to: ExpertTensor, kind: Kind) -> Kind {
        if self.terms.has(to) { wide_kind(kind) } else { kind }
    }

    /// Begins a pass over the experts that have rows. `resident` are their matrices, three for each, if no source loads them.
    fn loads<'a>(&self, resident: &'a [&'a Tensor]) -> Result<Box<dyn ExpertLoads + 'a>> {
        Ok(match &self.source {
            Some(source) => {
                let used: Vec<usize> = self.routing.ranges().iter().map(|(expert, _)| *expert).collect();
                source.load(&used)?
            }
            None => Box::new(Resident::new(resident)),
        })
    }
}

/// Computes a·Wᵀ + b in a dtype, a's or that of sums.
fn product(a: &Tensor, weight: &Tensor, bias: Option<&Tensor>, kind: Kind) -> Result<Tensor> {
    let [out, _] = matrix_shape(weight).unwrap_or_default();
    let mut result = Tensor::f_empty([a.size()[0], out], (kind, a.device()))?;
    if let Some(bias) = bias {
        fill_rows_(&mut result, bias)?;
    }
    base_product_into(&mut result, a, weight, bias.is_some())?;
    Ok(result)
}

/// Returns Σ over a row of a·b, `[rows, 1]`, summed in fp32 and rounded to a dtype. A dtype other than a's makes a copy of the products.
fn dot(a: &Tensor, b: &Tensor, kind: Kind) -> Result<Tensor> {
    Ok(a.f_mul(b)?.f_sum_dim_intlist([-1].as_slice(), true, kind)?)
}

/// Returns the sum of the rows, the gradient of a bias.
fn sum_of_rows(rows: &Tensor) -> Result<Tensor> {
    Ok(rows.f_sum_dim_intlist([0].as_slice(), false, rows.kind())?)
}

/// What an expert keeps for backward: g, h's other factor u, and the low-rank parts' `[rows, r]` of each term.
struct Kept {
    gate: Tensor,
    up: Tensor,
    inner: Vec<Tensor>,
}

/// Returns a copy in memory of its own.
fn copy(tensor: &Tensor) -> Result<Tensor> {
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

impl Function for Experts {
    fn name(&self) -> &'static str {
        "mixture of experts"
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (x_nh, weights_nk) = (inputs[X], inputs[WEIGHTS]);
        let is_gate_or_up = |index: usize| (index - MATRICES) % 3 < 2;
        let terms = &inputs[self.terms()..];
        let kind = x_nh.kind();
        self.x_was_kept = (MATRICES..self.biases())
            .any(|index| is_gate_or_up(index) && ctx.needs_input_grad(index))
            || (0..self.terms.count()).any(|term| {
                self.terms.is_to(term, ExpertTensor::GateUp) && ctx.needs_input_grad(self.terms() + 2 * term)
            });
        for tensor in &inputs[WEIGHTS..] {
            ctx.save(tensor);
        }
        if self.x_was_kept {
            ctx.save(x_nh);
        }
        let width = x_nh.size().last().copied().unwrap_or(1);
        let mut slots = self.routing.empty_slots(x_nh, width)?;
        let mut kept: Vec<Option<Kept>> = self.routing.ranges().iter().map(|_| None).collect();
        let biases = &inputs[self.biases()..self.terms()];
        let mut loads = self.loads(&inputs[MATRICES..self.biases()])?;
        while let Some((number, [gate_matrix, up_matrix, down_matrix])) = loads.next()? {
            let rows = self.routing.rows(number)?;
            let x = rows.of_tokens(x_nh)?;
            let bias = |which: usize| biases.get(3 * number + which).copied();
            let parts = |to| self.terms.parts(self.expert(number), to, terms);
            let wide = self.kind_of(ExpertTensor::GateUp, kind);
            let mut gate = product(&x, &gate_matrix, bias(0), wide)?;
            let mut up = product(&x, &up_matrix, bias(1), wide)?;
            let of_gate_up = parts(ExpertTensor::GateUp)?;
            let of_gate_up = low_rank::add(&of_gate_up, &in_kind(x, wide)?, &mut [&mut gate, &mut up])?;
            let (gate, up) = (in_kind(gate, kind)?, in_kind(up, kind)?);
            let mut inner = gate.f_empty_like()?;
            match self.clamp {
                Some(clamp) => fused::clamped_forward(clamp, &gate, &up, &mut inner)?,
                None => fused::forward(&gate, &up, None, &mut inner)?,
            }
            if ctx.will_run_backward() {
                kept[number] = Some(Kept { gate, up, inner: of_gate_up });
            } else {
                drop((gate, up));
            }
            let wide = self.kind_of(ExpertTensor::Down, kind);
            let mut result = product(&inner, &down_matrix, bias(2), wide)?;
            let of_down =
                low_rank::add(&parts(ExpertTensor::Down)?, &in_kind(inner, wide)?, &mut [&mut result])?;
            kept[number]
                .iter_mut()
                .for_each(|kept| kept.inner.extend(of_down.iter().map(Tensor::shallow_clone)));
            rows.write(&in_kind(result, kind)?, &mut slots)?;
        }
        drop(loads);
        // In the order of the numbers, whatever the order of the loads.
        for Kept { gate, up, inner } in kept.iter().flatten() {
            [gate, up].into_iter().chain(inner).for_each(|tensor| ctx.save(tensor));
        }
        drop(kept);
        // The slots of a token are added in their order.
        let mut y_nkh = self.routing.by_token(&slots)?;
        let _ = y_nkh.f_mul_(&weights_nk.f_unsqueeze(-1)?)?;
        Ok(vec![y_nkh.f_sum_dim_intlist([1].as_slice(), false, x_nh.kind())?])
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let mut gradients: Vec<Option<Tensor>> = (0..self.inputs()).map(|_| None).collect();
        let Some(grad_nh) = grads.into_iter().next().flatten() else { return Ok(gradients) };
        let may_overwrite = ctx.may_overwrite_saved();
        let mut saved = ctx.take_saved().into_iter();
        let mut next =
            || saved.next().ok_or_else(|| Error::invalid("mixture of experts", "a saved tensor is missing"));
        let weights_nk = next()?;
        let matrices: Vec<Tensor> = (MATRICES..self.biases()).map(|_| next()).collect::<Result<_>>()?;
        let biases: Vec<Tensor> = (self.biases()..self.terms()).map(|_| next()).collect::<Result<_>>()?;
        let terms: Vec<Tensor> = (self.terms()..self.inputs()).map(|_| next()).collect::<Result<_>>()?;
        let x_nh = if self.x_was_kept { Some(next()?) } else { None };
        let all = |_| -> Result<Option<Kept>> {
            let (gate, up) = (next()?, next()?);
            let inner = (0..self.terms.count()).map(|_| next()).collect::<Result<_>>()?;
            Ok(Some(Kept { gate, up, inner }))
        };
        let mut kept = self.routing.ranges().iter().map(all).collect::<Result<Vec<_>>>()?;
        let mut of_terms = TermGradients::new(&terms, ctx, self.terms())?;
        let kind = grad_nh.kind();

        let weights_slots = weights_nk.f_reshape([-1, 1])?;
        let slots = |width: i64| self.routing.empty_slots(&grad_nh, width);
        let width = grad_nh.size().last().copied().unwrap_or(1);
        let mut of_x = ctx.needs_input_grad(X).then(|| slots(width)).transpose()?;
        let mut of_weights = ctx.needs_input_grad(WEIGHTS).then(|| slots(1)).transpose()?;
        let matrices: Vec<&Tensor> = matrices.iter().collect();
        let mut loads = self.loads(&matrices)?;
        while let Some((number, [gate_matrix, up_matrix, down_matrix])) = loads.next()? {
            let rows = self.routing.rows(number)?;
            // The pass overwrites g and u, which another backward may need.
            let Kept { gate, up, inner: products_of_terms } = kept[number]
                .take()
                .ok_or_else(|| Error::invalid("mixture of experts", "an expert was loaded twice"))?;
            let mut products_of_terms = products_of_terms.into_iter();
            let expert = self.expert(number);
            let (gate, up) = if may_overwrite { (gate, up) } else { (copy(&gate)?, copy(&up)?) };
            let (grad, weights) = (rows.of_tokens(&grad_nh)?, rows.of_slots(&weights_slots)?);

            // q = d·D, and the gradients of g and u from w·q.
            let wide = self.kind_of(ExpertTensor::Down, kind);
            let of_down = self.terms.parts(expert, ExpertTensor::Down, &terms)?;
            let of_gate_up = self.terms.parts(expert, ExpertTensor::GateUp, &terms)?;
            let us: Vec<Tensor> = products_of_terms.by_ref().take(of_gate_up.len()).collect();
            let mut q = Tensor::f_empty(gate.size().as_slice(), (wide, gate.device()))?;
            // Where a term needs the gradient in the dtype of sums, a quantized matrix is multiplied by the same cast.
            let wide_grad = (!of_down.is_empty()).then(|| grad.f_to_kind(wide)).transpose()?;
            let of_base = wide_grad.as_ref().filter(|_| is_quantized(&down_matrix)).unwrap_or(&grad);
            base_gradient_into(&mut q, of_base, &down_matrix, false)?;
            // Of a term, ∂L/∂(h·Cᵀ) before it is multiplied by w.
            let mut of_vs = Vec::new();
            if let Some(grad) = &wide_grad {
                for part in &of_down {
                    let of_v = low_rank::gradient_of_u(part, &[grad])?;
                    low_rank::add_gradient(part, &of_v, &mut q)?;
                    of_vs.push(of_v);
                }
            }
            let q = in_kind(q, kind)?;
            let of_inner = q.f_mul(&weights)?;
            let fused::Gradients { gate: of_gate, up: of_up, product: inner } = match self.clamp {
                Some(clamp) => fused::clamped_backward(clamp, gate, up, of_inner)?,
                None => fused::backward(gate, up, None, of_inner)?,
            };
            if let Some(of_weights) = &mut of_weights {
                // A result has its bias, too.
                let of_result = match biases.get(3 * number + 2) {
                    Some(bias) => {
                        let wide = wide_kind(kind);
                        dot(&q, &inner, wide)?.f_add(&dot(&grad, bias, wide)?)?
                    }
                    None => dot(&q, &inner, kind)?,
                };
                rows.write(&of_result.f_to_kind(of_weights.kind())?, of_weights)?;
            }
            drop(q);

            // The gradients of the expert's matrices, if they are inputs.
            let needed = |which: usize| {
                let index = MATRICES + 3 * number + which;
                (index < self.biases() && ctx.needs_input_grad(index)).then_some(index)
            };
            let needed_bias = |which: usize| {
                let index = self.biases() + 3 * number + which;
                (index < self.terms() && ctx.needs_input_grad(index)).then_some(index)
            };
            if needed(2).is_some() || needed_bias(2).is_some() {
                let of_result = grad.f_mul(&weights)?;
                if let Some(index) = needed(2) {
                    gradients[index] = Some(mm(&of_result.f_tr()?, &inner)?);
                }
                if let Some(index) = needed_bias(2) {
                    gradients[index] = Some(sum_of_rows(&of_result)?);
                }
            }
            if let Some(grad) = &wide_grad {
                let weights = weights.f_to_kind(wide)?;
                let of_result = grad.f_mul(&weights)?;
                let inner = inner.f_to_kind(wide)?;
                for ((part, of_v), v) in of_down.iter().zip(of_vs).zip(products_of_terms) {
                    of_terms.write_b(&self.terms, expert, part, &[&of_result], &v)?;
                    of_terms.write_a(&self.terms, expert, part, &of_v.f_mul(&weights)?, &inner)?;
                }
            }
            for (which, of_product) in [&of_gate, &of_up].into_iter().enumerate() {
                if let Some(index) = needed_bias(which) {
                    gradients[index] = Some(sum_of_rows(of_product)?);
                }
            }
            drop((grad, wide_grad, inner));
            if let Some(x) = x_nh.as_ref().map(|x_nh| rows.of_tokens(x_nh)).transpose()? {
                for (which, of_product) in [&of_gate, &of_up].into_iter().enumerate() {
                    if let Some(index) = needed(which) {
                        gradients[index] = Some(mm(&of_product.f_tr()?, &x)?);
                    }
                }
            }
            let wide = self.kind_of(ExpertTensor::GateUp, kind);
            let mut dus = Vec::new();
            if !of_gate_up.is_empty() {
                let (of_gate, of_up) = (of_gate.f_to_kind(wide)?, of_up.f_to_kind(wide)?);
                for (part, u) in of_gate_up.iter().zip(&us) {
                    of_terms.write_b(&self.terms, expert, part, &[&of_gate, &of_up], u)?;
                    let du = low_rank::gradient_of_u(part, &[&of_gate, &of_up])?;
                    dus.push(du);
                }
                if let Some(x_nh) = &x_nh {
                    let x = rows.of_tokens(x_nh)?.f_to_kind(wide)?;
                    for (part, du) in of_gate_up.iter().zip(&dus) {
                        of_terms.write_a(&self.terms, expert, part, du, &x)?;
                    }
                }
            }
            if let Some(of_x) = &mut of_x {
                let mut sum = Tensor::f_empty([of_gate.size()[0], width], (wide, of_x.device()))?;
                base_gradient_into(&mut sum, &of_gate, &gate_matrix, false)?;
                base_gradient_into(&mut sum, &of_up, &up_matrix, true)?;
                for (part, du) in of_gate_up.iter().zip(&dus) {
                    low_rank::add_gradient(part, du, &mut sum)?;
                }
                rows.write(&in_kind(sum, kind)?, of_x)?;
            }
        }
        drop(loads);
        let sum = |slots: Tensor| -> Result<Tensor> {
            Ok(self.routing.by_token(&slots)?.f_sum_dim_intlist([1].as_slice(), false, kind)?)
        };
        gradients[X] = of_x.map(sum).transpose()?;
        let by_token =
            |slots: Tensor| -> Result<Tensor> { Ok(self.routing.by_token(&slots)?.f_squeeze_dim(-1)?) };
        gradients[WEIGHTS] = of_weights.map(by_token).transpose()?;
        for (index, gradient) in (self.terms()..).zip(of_terms.into_list()) {
            gradients[index] = gradient;
        }
        Ok(gradients)
    }
}
