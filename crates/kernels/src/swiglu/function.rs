//! SiLU(gate)·up as an autograd function.

use runtime::autograd::{Backward, Forward, Function};
use runtime::tensor_memory::is_sole_owner;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use super::{NAME, cpu, cuda, record, tensors};

/// Checks the tensors and returns the dtype of their product.
pub(super) fn check(gate: &Tensor, up: &Tensor) -> Result<Kind> {
    let refuse = |reason: String| Err(Error::invalid(NAME, reason));
    for (name, tensor) in [("gate", gate), ("up", up)] {
        if !tensor.defined() {
            return refuse(format!("`{name}` is undefined"));
        }
        if !cpu::takes(tensor.kind()) {
            return refuse(format!(
                "`{name}` is {:?}; expected Float, Double, BFloat16 or Half: convert it with `to_kind`",
                tensor.kind()
            ));
        }
        if tensor.is_sparse() || tensor.is_mkldnn() {
            return refuse(format!("`{name}` is sparse or MKL-DNN's; make it dense with `to_dense`"));
        }
    }
    if gate.size() != up.size() {
        return refuse(format!("gate is {:?} and up {:?}; expected one shape", gate.size(), up.size()));
    }
    if gate.device() != up.device() {
        let (gate, up) = (gate.device(), up.device());
        return refuse(format!("gate is on {gate:?} and up on {up:?}; move them to one device"));
    }
    Ok(match (gate.kind(), up.kind()) {
        (gate, up) if gate == up => gate,
        (Kind::Double, _) | (_, Kind::Double) => Kind::Double,
        _ => Kind::Float,
    })
}

/// Inputs: gate and up, of one shape, dtype and device, on the CPU or a device with CUDA kernels. Output: the product.
#[derive(Debug, Default)]
pub(super) struct Product {
    /// Whether forward saved up, which only the gradient of gate needs.
    up_was_kept: bool,
}

impl Function for Product {
    fn name(&self) -> String {
        "SiLU(gate)·up".to_owned()
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (gate, up) = (inputs[0], inputs[1]);
        let product = Tensor::f_empty(gate.size(), (gate.kind(), gate.device()))?;
        let forward = if gate.device() == Device::Cpu { cpu::forward } else { cuda::forward };
        let (gate_rows, up_rows, product_rows) = (rows(gate)?, rows(up)?, rows(&product)?);
        forward(&tensors::Forward { gate: &gate_rows, up: &up_rows, silu: None, product: &product_rows })?;
        record("runtime::swiglu", &product, 3)?;
        ctx.save(gate);
        self.up_was_kept = ctx.needs_input_grad(0);
        if self.up_was_kept {
            ctx.save(up);
        }
        Ok(vec![product])
    }

    fn backward(&self, ctx: &mut Backward, mut grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let Some(grad) = grads.pop().flatten() else { return Ok(vec![None, None]) };
        let (gate_needed, up_needed) = (self.up_was_kept && ctx.needs_input_grad(0), ctx.needs_input_grad(1));
        let mut saved = ctx.take_saved().into_iter();
        let Some(gate) = saved.next() else {
            return Err(Error::invalid(NAME, "forward saved no gate for backward"));
        };
        let up = saved.next();
        let (size, kind, device) = (grad.size(), grad.kind(), grad.device());
        // A gradient may overwrite the upstream gradient if nothing else uses it.
        let alone = !ctx.is_recorded() && grad.is_contiguous() && !grad.is_neg() && is_sole_owner(&grad)?;
        let dense = rows(&grad)?;
        let spare = if alone { Some(grad) } else { None };
        let empty = || Tensor::f_empty(&size, (kind, device));
        let mut spare = spare.into_iter();
        let mut place = |needed: bool| needed.then(|| spare.next().map_or_else(empty, Ok)).transpose();
        let (gate_grad, up_grad) = (place(gate_needed)?, place(up_needed)?);
        let matrix = |tensor: &Option<Tensor>| tensor.as_ref().map(rows).transpose();
        let gate = rows(&gate)?;
        // If up was not saved, no requested gradient depends on it.
        let up_rows = matrix(&up)?;
        let up_rows = up_rows.as_ref().unwrap_or(&gate);
        let (gate_grad_rows, up_grad_rows) = (matrix(&gate_grad)?, matrix(&up_grad)?);
        let backward = if device == Device::Cpu { cpu::backward } else { cuda::backward };
        backward(&tensors::Backward {
            gate: &gate,
            up: up_rows,
            silu: None,
            grad: &dense,
            gate_grad: gate_grad_rows.as_ref(),
            up_grad: up_grad_rows.as_ref(),
            product: None,
        })?;
        let passes = [true, true, up.is_some(), gate_grad.is_some(), up_grad.is_some()];
        record("runtime::swiglu_backward", &dense, passes.into_iter().filter(|there| *there).count())?;
        Ok(vec![gate_grad, up_grad])
    }
}

/// Returns the tensor as dense rows: a view if possible, else a copy.
fn rows(tensor: &Tensor) -> Result<Tensor> {
    let tensor = tensor.f_resolve_neg()?;
    let size = tensor.size();
    let columns = size.last().copied().unwrap_or(1);
    let leading = size.iter().rev().skip(1).product::<i64>();
    let matrix = tensor.f_reshape([leading, columns])?;
    let stride = matrix.stride();
    let dense = (columns < 2 || stride[1] == 1) && (leading < 2 || stride[0] >= columns);
    if dense { Ok(matrix) } else { Ok(matrix.f_contiguous()?) }
}

#[cfg(test)]
mod tests {
    use runtime::autograd::{self, GradcheckConfig, gradcheck};
    use runtime::random::Generator;
    use tch::kind;

    use super::*;
    use crate::swiglu::reference::recorded_product;
    use crate::swiglu::silu_mul;

    #[test]
    fn the_node_has_the_correct_derivative() {
        let mut generator = Generator::new(8).unwrap();
        let mut leaf =
            |shape: &[i64]| generator.normal(shape, kind::DOUBLE_CPU).unwrap().set_requires_grad(true);
        let (gate, up, both) = (leaf(&[2, 3, 4]), leaf(&[2, 3, 4]), leaf(&[3, 8]));
        let product = |x: &[Tensor]| Ok(vec![silu_mul(&x[0], &x[1])?]);
        let halves_product =
            |x: &[Tensor]| Ok(vec![silu_mul(&x[0].f_narrow(1, 0, 4)?, &x[0].f_narrow(1, 4, 4)?)?]);
        for report in [
            gradcheck(product, &[&gate, &up], GradcheckConfig::default()).unwrap(),
            gradcheck(halves_product, &[&both], GradcheckConfig::default()).unwrap(),
        ] {
            assert!(report.percent_of_tolerance <= 100.0, "{report}");
        }
        let expected = gate.silu() * &up;
        let error = (silu_mul(&gate, &up).unwrap() - expected).abs().max().double_value(&[]);
        assert!(error < 1e-15, "{error}");
        let words = silu_mul(&gate, &both).unwrap_err().to_string();
        assert_eq!(words, "fused swiglu: gate is [2, 3, 4] and up [3, 8]; expected one shape");
    }

    /// The chain for other devices, compared on the CPU.
    #[test]
    fn the_chain_of_operators_matches_the_pass() {
        let mut generator = Generator::new(9).unwrap();
        for (kind, tolerance) in
            [(Kind::Double, 1e-14), (Kind::Float, 2e-6), (Kind::BFloat16, 8e-3), (Kind::Half, 1e-3)]
        {
            let mut leaf = || {
                let x = generator.normal(&[7, 65], kind::FLOAT_CPU).unwrap() * 3.0;
                x.to_kind(kind).set_requires_grad(true)
            };
            let (gate, up) = (leaf(), leaf());
            let with_slopes = |y: Tensor| {
                let loss = y.sum(Kind::Double);
                let keep = autograd::Keep::default();
                let slopes = autograd::grad(&[&loss], &[None], &[&gate, &up], keep).unwrap();
                slopes.into_iter().flatten().chain([y]).collect::<Vec<_>>()
            };
            let ours = with_slopes(silu_mul(&gate, &up).unwrap());
            let theirs = with_slopes(recorded_product(&gate, &up, kind).unwrap());
            assert_eq!((ours.len(), theirs.len()), (3, 3));
            for (ours, theirs) in ours.iter().zip(&theirs) {
                let (ours, theirs) = (ours.to_kind(Kind::Double), theirs.to_kind(Kind::Double));
                let share = ((&ours - &theirs).abs() / ((theirs.abs() + 1.0) * tolerance)).max();
                assert!(share.double_value(&[]) <= 1.0, "{kind:?}: {share:?} of the tolerance");
            }
        }
    }
}
