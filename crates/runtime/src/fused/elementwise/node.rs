//! An expression on the CPU as a node of libtorch's graph.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::Expression;
use super::operands::Operands;
use crate::autograd::{Backward, Forward, Function};
use crate::error::{Error, Result};
use crate::profile::{Flops, record_external};
use crate::sys::elementwise as sys;
use crate::sys::tensor::{identity, is_sole_owner};

/// One application of an expression.
pub(super) struct Pass {
    expression: Arc<Expression>,
    operands: Operands,
    /// Of each input: which saved tensor it is.
    saved: Vec<Option<usize>>,
}

impl Pass {
    pub(super) fn new(expression: Arc<Expression>, operands: Operands) -> Self {
        Self { saved: vec![None; expression.inputs], expression, operands }
    }

    fn run(
        &self,
        name: &str,
        compiled: &super::Compiled,
        sources: &[&Tensor],
        targets: &[&Tensor],
    ) -> Result<()> {
        let double = self.operands.kind == Kind::Double;
        sys::run(&compiled.program, &self.operands.shape, double, sources, targets)?;
        let bytes = |tensor: &&Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        let moved: usize = sources.iter().chain(targets).map(bytes).sum();
        record_external(name, Flops::default(), moved as u64)
    }
}

impl Function for Pass {
    fn name(&self) -> String {
        "Elementwise".to_owned()
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let Operands { shape, kind, .. } = &self.operands;
        let forward = &self.expression.forward;
        let outputs: Vec<Tensor> = (0..self.expression.roots.len())
            .map(|_| Ok(Tensor::f_empty(shape, (*kind, Device::Cpu))?))
            .collect::<Result<_>>()?;
        let sources: Vec<&Tensor> = forward.sources.iter().map(|&input| inputs[input]).collect();
        self.run("runtime::elementwise", forward, &sources, &outputs.iter().collect::<Vec<_>>())?;

        if ctx.will_run_backward() {
            let needed: Vec<bool> = (0..inputs.len()).map(|input| ctx.needs_input_grad(input)).collect();
            let backward = self.expression.backward(&needed, &vec![true; outputs.len()]);
            let mut known: Vec<usize> = Vec::new();
            for &input in backward.compiled.sources.iter().filter(|&&source| source < inputs.len()) {
                let tensor = identity(inputs[input])?;
                let position = known.iter().position(|&other| other == tensor);
                self.saved[input] = Some(position.unwrap_or(known.len()));
                if position.is_none() {
                    known.push(tensor);
                    ctx.save(inputs[input]);
                }
            }
        }
        Ok(outputs)
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let inputs = self.expression.inputs;
        let mut needed: Vec<bool> = (0..inputs).map(|input| ctx.needs_input_grad(input)).collect();
        let given: Vec<bool> = grads.iter().map(Option::is_some).collect();
        let saved = ctx.take_saved();
        let mut found: Vec<Option<Tensor>> = (0..inputs).map(|_| None).collect();
        // As libtorch's addition does: a gradient that is the upstream one needs no pass.
        for &(input, output) in &self.expression.backward(&needed, &given).passed_on {
            let (size, kind) = &self.operands.given[input];
            if let Some(grad) = &grads[output]
                && grad.size() == *size
                && grad.kind() == *kind
            {
                found[input] = Some(grad.shallow_clone());
                needed[input] = false;
            }
        }
        let backward = self.expression.backward(&needed, &given);
        if backward.gradients.is_empty() {
            return Ok(found);
        }

        // Upstream gradients whose memory may become that of gradients: nobody else has them.
        let mut spare: Vec<usize> = Vec::new();
        for (index, grad) in grads.iter().enumerate() {
            if let Some(grad) = grad
                && !ctx.is_recorded()
                && grad.size() == self.operands.shape
                && grad.is_contiguous()
                && is_sole_owner(grad)?
            {
                spare.push(index);
            }
        }
        let mut gradients: Vec<(usize, Tensor)> = Vec::new();
        for &input in &backward.gradients {
            let (size, kind) = &self.operands.given[input];
            let fits = |index: &usize| grads[*index].as_ref().is_some_and(|grad| grad.kind() == *kind);
            let place = if *size == self.operands.shape { spare.iter().position(fits) } else { None };
            let gradient = match place.and_then(|place| grads[spare.remove(place)].as_ref()) {
                Some(grad) => grad.shallow_clone(),
                None => Tensor::f_empty(size, (*kind, Device::Cpu))?,
            };
            gradients.push((input, gradient));
        }
        let source = |&source: &usize| -> Result<&Tensor> {
            let tensor = match source.checked_sub(inputs) {
                Some(output) => grads[output].as_ref(),
                None => self.saved[source].and_then(|place| saved.get(place)),
            };
            tensor.ok_or_else(|| Error::invalid(sys::NAME, "backward reads a tensor that was not kept"))
        };
        let sources: Vec<&Tensor> = backward.compiled.sources.iter().map(source).collect::<Result<_>>()?;
        let targets: Vec<&Tensor> = gradients.iter().map(|(_, gradient)| gradient).collect();
        self.run("runtime::elementwise_backward", &backward.compiled, &sources, &targets)?;

        for (input, gradient) in gradients {
            found[input] = Some(gradient);
        }
        Ok(found)
    }
}
