//! SiLU(gate)·up as an autograd function.

use runtime::autograd::{Backward, Forward, Function};
use runtime::tensor_layout::TensorLayout;
use runtime::tensor_memory::Dense;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use super::{NAME, cpu, cuda, record, tensors};
use crate::operands::has_flat_rows;

/// Checks the tensors and returns the dtype and the device of their product.
pub(super) fn check(gate: &Tensor, up: &Tensor) -> Result<(Kind, Device)> {
    let refuse = |reason: String| Err(Error::invalid(NAME, reason));
    let layout = |name: &str, tensor: &Tensor| match TensorLayout::of(tensor) {
        Err(_) if !tensor.defined() => Err(Error::invalid(NAME, format!("`{name}` is undefined"))),
        described => described,
    };
    let (gate, up) = (layout("gate", gate)?, layout("up", up)?);
    for (name, tensor) in [("gate", &gate), ("up", &up)] {
        if !cpu::takes(tensor.kind()) {
            return refuse(format!(
                "`{name}` is {:?}; expected Float, Double, BFloat16 or Half: convert it with `to_kind`",
                tensor.kind()
            ));
        }
        if !tensor.is_strided() {
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
    let kind = match (gate.kind(), up.kind()) {
        (gate, up) if gate == up => gate,
        (Kind::Double, _) | (_, Kind::Double) => Kind::Double,
        _ => Kind::Float,
    };
    Ok((kind, gate.device()))
}

/// Inputs: gate and up, of one shape, dtype and device, on the CPU or a device with CUDA kernels. Output: the product.
#[derive(Debug, Default)]
pub(super) struct Product {
    /// Whether forward saved up, which only the gradient of gate needs.
    up_was_kept: bool,
}

impl Function for Product {
    fn name(&self) -> &'static str {
        "SiLU(gate)·up"
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (gate, up) = (inputs[0], inputs[1]);
        let layout = TensorLayout::of(gate)?;
        let product = Tensor::f_empty(layout.size(), (layout.kind(), layout.device()))?;
        let forward = if layout.device() == Device::Cpu { cpu::forward } else { cuda::forward };
        let (gate_rows, up_rows) = (rows(gate)?, rows(up)?);
        forward(&tensors::Forward { gate: &gate_rows, up: &up_rows, silu: None, product: &product })?;
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
        let layout = TensorLayout::of(&grad)?;
        // A gradient may overwrite the upstream gradient if nothing else uses it.
        let alone =
            !ctx.is_recorded() && layout.is_contiguous() && !layout.is_neg() && layout.is_sole_owner();
        let empty = || Tensor::f_empty(layout.size(), (layout.kind(), layout.device()));
        let of_gate = (gate_needed && !alone).then(empty).transpose()?;
        let of_up = (up_needed && (gate_needed || !alone)).then(empty).transpose()?;
        {
            let (grad, gate) = (rows(&grad)?, rows(&gate)?);
            // If up was not saved, no requested gradient depends on it.
            let up = up.as_ref().map(rows).transpose()?;
            let backward = if layout.device() == Device::Cpu { cpu::backward } else { cuda::backward };
            backward(&tensors::Backward {
                gate: &gate,
                up: up.as_deref().unwrap_or(&gate),
                silu: None,
                grad: &grad,
                gate_grad: gate_needed.then(|| of_gate.as_ref().unwrap_or(&grad)),
                up_grad: up_needed.then(|| of_up.as_ref().unwrap_or(&grad)),
                product: None,
            })?;
            let passes = [true, true, up.is_some(), gate_needed, up_needed];
            record("runtime::swiglu_backward", &grad, passes.into_iter().filter(|there| *there).count())?;
        }
        // The upstream gradient is the first gradient that has no memory of its own.
        let mut grad = Some(grad);
        let mut place =
            |needed: bool, own: Option<Tensor>| if needed { own.or_else(|| grad.take()) } else { None };
        Ok(vec![place(gate_needed, of_gate), place(up_needed, of_up)])
    }
}

/// Returns the tensor as rows of one distance, each dense: itself, or a copy.
fn rows(tensor: &Tensor) -> Result<Dense<'_>> {
    let layout = TensorLayout::of(tensor)?;
    if has_flat_rows(&layout) && !layout.is_neg() {
        return Ok(Dense::Same(tensor));
    }
    let tensor = tensor.f_resolve_neg()?;
    Ok(Dense::Copy(if has_flat_rows(&layout) { tensor } else { tensor.f_contiguous()? }))
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
