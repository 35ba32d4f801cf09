//! The experts of a mixture as one function. The mathematics is in the [module above](super).

use std::sync::Arc;

use kernels::low_rank::{base_gradient_into, base_product_into};
use kernels::matmul::{mm, wide_kind};
use kernels::quantized::matrix_shape;
use kernels::swiglu::{self as fused, Clamp};
use runtime::autograd::{Backward, Forward, Function};
use runtime::ops::fill_rows_;
use runtime::{Error, Result};
use tch::Tensor;

use super::Routing;
use super::source::{ExpertLoads, ExpertSource, Resident};

/// Index of x, of the weights of the slots, and of the first expert's matrices, among the inputs.
const X: usize = 0;
const WEIGHTS: usize = 1;
const MATRICES: usize = 2;

/// Inputs: x `[n, h]`, the weights of the slots `[n, k]`, and for each expert that has rows its matrices gate, up `[i, h]` and down
/// `[h, i]`, dense in x's dtype or in NF4, unless a source loads them; with a clamp then for each its biases, `[i]`, `[i]` and `[h]`. Output:
/// `[n, h]`.
pub(super) struct Experts {
    routing: Routing,
    source: Option<Arc<dyn ExpertSource>>,
    /// The numbers of the activation of experts with biases.
    clamp: Option<Clamp>,
    /// Whether x was saved: if a matrix that multiplies it is trained.
    x_was_kept: bool,
}

impl Experts {
    pub(super) fn new(routing: Routing, source: Option<Arc<dyn ExpertSource>>, clamp: Option<Clamp>) -> Self {
        Self { routing, source, clamp, x_was_kept: false }
    }

    /// The number of the inputs before the biases.
    fn biases(&self) -> usize {
        MATRICES + if self.source.is_some() { 0 } else { 3 * self.routing.ranges().len() }
    }

    /// The inputs' number.
    fn inputs(&self) -> usize {
        self.biases() + if self.clamp.is_some() { 3 * self.routing.ranges().len() } else { 0 }
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

/// Computes a·Wᵀ + b in a's dtype.
fn product(a: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let [out, _] = matrix_shape(weight).unwrap_or_default();
    let mut result = Tensor::f_empty([a.size()[0], out], (a.kind(), a.device()))?;
    if let Some(bias) = bias {
        fill_rows_(&mut result, bias)?;
    }
    base_product_into(&mut result, a, weight, bias.is_some())?;
    Ok(result)
}

/// Returns Σ over a row of a·b, `[rows, 1]`, in the dtype of sums.
fn dot(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    Ok(a.f_mul(b)?.f_sum_dim_intlist([-1].as_slice(), true, wide_kind(a.kind()))?)
}

/// Returns the sum of the rows, the gradient of a bias.
fn sum_of_rows(rows: &Tensor) -> Result<Tensor> {
    Ok(rows.f_sum_dim_intlist([0].as_slice(), false, rows.kind())?)
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
        self.x_was_kept =
            (MATRICES..self.biases()).any(|index| is_gate_or_up(index) && ctx.needs_input_grad(index));
        for tensor in &inputs[WEIGHTS..] {
            ctx.save(tensor);
        }
        if self.x_was_kept {
            ctx.save(x_nh);
        }
        let width = x_nh.size().last().copied().unwrap_or(1);
        let mut slots = self.routing.empty_slots(x_nh, width)?;
        let mut kept: Vec<Option<[Tensor; 2]>> = self.routing.ranges().iter().map(|_| None).collect();
        let biases = &inputs[self.biases()..];
        let mut loads = self.loads(&inputs[MATRICES..self.biases()])?;
        while let Some((number, [gate_matrix, up_matrix, down_matrix])) = loads.next()? {
            let rows = self.routing.rows(number)?;
            let x = rows.of_tokens(x_nh)?;
            let bias = |which: usize| biases.get(3 * number + which).copied();
            let (gate, up) = (product(&x, &gate_matrix, bias(0))?, product(&x, &up_matrix, bias(1))?);
            drop(x);
            let mut inner = gate.f_empty_like()?;
            match self.clamp {
                Some(clamp) => fused::clamped_forward(clamp, &gate, &up, &mut inner)?,
                None => fused::forward(&gate, &up, None, &mut inner)?,
            }
            if ctx.will_run_backward() {
                kept[number] = Some([gate, up]);
            } else {
                drop((gate, up));
            }
            rows.write(&product(&inner, &down_matrix, bias(2))?, &mut slots)?;
        }
        drop(loads);
        // In the order of the numbers, whatever the order of the loads.
        kept.iter().flatten().flatten().for_each(|tensor| ctx.save(tensor));
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
        let biases: Vec<Tensor> = (self.biases()..self.inputs()).map(|_| next()).collect::<Result<_>>()?;
        let x_nh = if self.x_was_kept { Some(next()?) } else { None };
        let both = |_| -> Result<Option<[Tensor; 2]>> { Ok(Some([next()?, next()?])) };
        let mut kept = self.routing.ranges().iter().map(both).collect::<Result<Vec<_>>>()?;

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
            let [gate, up] = kept[number]
                .take()
                .ok_or_else(|| Error::invalid("mixture of experts", "an expert was loaded twice"))?;
            let (gate, up) = if may_overwrite { (gate, up) } else { (copy(&gate)?, copy(&up)?) };
            let (grad, weights) = (rows.of_tokens(&grad_nh)?, rows.of_slots(&weights_slots)?);

            // q = d·D, and the gradients of g and u from w·q.
            let mut q = gate.f_empty_like()?;
            base_gradient_into(&mut q, &grad, &down_matrix, false)?;
            let of_inner = q.f_mul(&weights)?;
            let fused::Gradients { gate: of_gate, up: of_up, product: inner } = match self.clamp {
                Some(clamp) => fused::clamped_backward(clamp, gate, up, of_inner)?,
                None => fused::backward(gate, up, None, of_inner)?,
            };
            if let Some(of_weights) = &mut of_weights {
                let of_product = dot(&q, &inner)?;
                // A result has its bias, too.
                let of_result = match biases.get(3 * number + 2) {
                    Some(bias) => of_product.f_add(&dot(&grad, bias)?)?,
                    None => of_product,
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
                (index < self.inputs() && ctx.needs_input_grad(index)).then_some(index)
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
            for (which, of_product) in [&of_gate, &of_up].into_iter().enumerate() {
                if let Some(index) = needed_bias(which) {
                    gradients[index] = Some(sum_of_rows(of_product)?);
                }
            }
            drop((grad, inner));
            if let Some(x) = x_nh.as_ref().map(|x_nh| rows.of_tokens(x_nh)).transpose()? {
                for (which, of_product) in [&of_gate, &of_up].into_iter().enumerate() {
                    if let Some(index) = needed(which) {
                        gradients[index] = Some(mm(&of_product.f_tr()?, &x)?);
                    }
                }
            }
            if let Some(of_x) = &mut of_x {
                let mut sum = Tensor::f_empty([of_gate.size()[0], width], (of_x.kind(), of_x.device()))?;
                base_gradient_into(&mut sum, &of_gate, &gate_matrix, false)?;
                base_gradient_into(&mut sum, &of_up, &up_matrix, true)?;
                rows.write(&sum, of_x)?;
            }
        }
        drop(loads);
        let kind = grad_nh.kind();
        let sum = |slots: Tensor| -> Result<Tensor> {
            Ok(self.routing.by_token(&slots)?.f_sum_dim_intlist([1].as_slice(), false, kind)?)
        };
        gradients[X] = of_x.map(sum).transpose()?;
        let by_token =
            |slots: Tensor| -> Result<Tensor> { Ok(self.routing.by_token(&slots)?.f_squeeze_dim(-1)?) };
        gradients[WEIGHTS] = of_weights.map(by_token).transpose()?;
        Ok(gradients)
    }
}
