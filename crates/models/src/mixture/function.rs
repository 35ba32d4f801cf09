//! The experts of a mixture as one function. The mathematics is in the [module above](super).

use kernels::low_rank::{base_gradient_into, base_product_into};
use kernels::matmul::{mm, wide_kind};
use kernels::quantized::matrix_shape;
use kernels::swiglu as fused;
use runtime::autograd::{Backward, Forward, Function};
use runtime::{Error, Result};
use tch::Tensor;

use super::Routing;

/// Index of x, of the weights of the slots, and of the first expert's matrices, among the inputs.
const X: usize = 0;
const WEIGHTS: usize = 1;
const MATRICES: usize = 2;

/// Inputs: x `[n, h]`, the weights of the slots `[n, k]`, and for each expert that has rows its matrices gate, up `[i, h]` and down
/// `[h, i]`, dense in x's dtype or in NF4. Output: `[n, h]`.
pub(super) struct Experts {
    routing: Routing,
    /// Whether x was saved: if a matrix that multiplies it is trained.
    x_was_kept: bool,
}

impl Experts {
    pub(super) fn new(routing: Routing) -> Self {
        Self { routing, x_was_kept: false }
    }

    /// The inputs' number.
    fn inputs(&self) -> usize {
        MATRICES + 3 * self.routing.ranges().len()
    }
}

/// Computes a·Wᵀ in a's dtype.
fn product(a: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let [out, _] = matrix_shape(weight).unwrap_or_default();
    let mut result = Tensor::f_empty([a.size()[0], out], (a.kind(), a.device()))?;
    base_product_into(&mut result, a, weight, false)?;
    Ok(result)
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
            (MATRICES..inputs.len()).any(|index| is_gate_or_up(index) && ctx.needs_input_grad(index));
        for tensor in &inputs[WEIGHTS..] {
            ctx.save(tensor);
        }
        if self.x_was_kept {
            ctx.save(x_nh);
        }
        let x_rh = self.routing.dispatch(x_nh)?;
        let y_rh = x_rh.f_empty_like()?;
        for (matrices, (_, range)) in inputs[MATRICES..].chunks(3).zip(self.routing.ranges()) {
            let count = range.end - range.start;
            let x = x_rh.f_narrow(0, range.start, count)?;
            let (gate, up) = (product(&x, matrices[0])?, product(&x, matrices[1])?);
            let mut inner = gate.f_empty_like()?;
            fused::forward(&gate, &up, None, &mut inner)?;
            if ctx.will_run_backward() {
                ctx.save(&gate);
                ctx.save(&up);
            }
            base_product_into(&mut y_rh.f_narrow(0, range.start, count)?, &inner, matrices[2], false)?;
        }
        drop(x_rh);
        // The slots of a token are added in their order.
        let y_nkh = self.routing.by_slot(&y_rh)?;
        let weighted = y_nkh.f_mul(&weights_nk.f_unsqueeze(-1)?)?;
        Ok(vec![weighted.f_sum_dim_intlist([1].as_slice(), false, x_nh.kind())?])
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let mut gradients: Vec<Option<Tensor>> = (0..self.inputs()).map(|_| None).collect();
        let Some(grad_nh) = grads.into_iter().next().flatten() else { return Ok(gradients) };
        let may_overwrite = ctx.may_overwrite_saved();
        let mut saved = ctx.take_saved().into_iter();
        let mut next =
            || saved.next().ok_or_else(|| Error::invalid("mixture of experts", "a saved tensor is missing"));
        let weights_nk = next()?;
        let matrices: Vec<Tensor> = (MATRICES..self.inputs()).map(|_| next()).collect::<Result<_>>()?;
        let x_rh = if self.x_was_kept { Some(self.routing.dispatch(&next()?)?) } else { None };

        let weights_r = self.routing.by_row(&weights_nk)?;
        let grad_rh = self.routing.dispatch(&grad_nh)?;
        let of_x = ctx.needs_input_grad(X).then(|| grad_rh.f_empty_like()).transpose()?;
        let of_weights = ctx.needs_input_grad(WEIGHTS).then(|| weights_r.f_empty_like()).transpose()?;
        for (number, (_, range)) in self.routing.ranges().iter().enumerate() {
            let (first, count) = (MATRICES + 3 * number, range.end - range.start);
            let rows = |tensor: &Tensor| tensor.f_narrow(0, range.start, count);
            let [gate_matrix, up_matrix, down_matrix] =
                [0, 1, 2].map(|which| &matrices[first - MATRICES + which]);
            // The pass overwrites g and u, which another backward may need.
            let (gate, up) = (next()?, next()?);
            let (gate, up) = if may_overwrite { (gate, up) } else { (copy(&gate)?, copy(&up)?) };
            let (grad, weights) = (rows(&grad_rh)?, rows(&weights_r)?);

            // q = d·D, and the gradients of g and u from w·q.
            let mut q = gate.f_empty_like()?;
            base_gradient_into(&mut q, &grad, down_matrix, false)?;
            let fused::Gradients { gate: of_gate, up: of_up, product: inner } =
                fused::backward(gate, up, None, q.f_mul(&weights)?)?;
            if let Some(of_weights) = &of_weights {
                let dot = q.f_mul(&inner)?.f_sum_dim_intlist([-1].as_slice(), true, wide_kind(q.kind()))?;
                rows(of_weights)?.f_copy_(&dot)?;
            }
            drop(q);
            if let Some(of_x) = &of_x {
                let mut sum = rows(of_x)?;
                base_gradient_into(&mut sum, &of_gate, gate_matrix, false)?;
                base_gradient_into(&mut sum, &of_up, up_matrix, true)?;
            }

            // The gradients of the expert's matrices.
            if let Some(x) = x_rh.as_ref().map(rows).transpose()? {
                for (index, of_product) in [(first, &of_gate), (first + 1, &of_up)] {
                    if ctx.needs_input_grad(index) {
                        gradients[index] = Some(mm(&of_product.f_tr()?, &x)?);
                    }
                }
            }
            if ctx.needs_input_grad(first + 2) {
                gradients[first + 2] = Some(mm(&grad.f_mul(&weights)?.f_tr()?, &inner)?);
            }
        }
        let kind = grad_nh.kind();
        let sum = |rows: Tensor| -> Result<Tensor> {
            Ok(self.routing.by_slot(&rows)?.f_sum_dim_intlist([1].as_slice(), false, kind)?)
        };
        gradients[X] = of_x.map(sum).transpose()?;
        let by_slot =
            |rows: Tensor| -> Result<Tensor> { Ok(self.routing.by_slot(&rows)?.f_squeeze_dim(-1)?) };
        gradients[WEIGHTS] = of_weights.map(by_slot).transpose()?;
        Ok(gradients)
    }
}
