//! The rotation as an autograd function.

use runtime::autograd::{self, Backward, Forward, Function};
use runtime::tensor_memory::dense;
use runtime::{Error, Result};
use tch::Tensor;

use super::{NAME, Rotation, pass_for};

/// Inputs: any number of tensors of heads. Outputs: the same, rotated.
pub(super) struct Rotate {
    table: Tensor,
    /// Used by forward; backward gets them from libtorch, which detects changes in between.
    positions: Option<Tensor>,
    given: bool,
    inverse: bool,
}

impl Rotate {
    pub(super) fn new(table: &Tensor, positions: Option<&Tensor>, inverse: bool) -> Result<Self> {
        let positions = positions.map(dense).transpose()?;
        Ok(Self { table: table.shallow_clone(), given: positions.is_some(), positions, inverse })
    }

    fn rotation<'a>(&'a self, positions: Option<&'a Tensor>, inverse: bool) -> Rotation<'a> {
        Rotation { table: &self.table, positions, inverse }
    }
}

impl Function for Rotate {
    const TWICE_DIFFERENTIABLE: bool = true;

    fn name(&self) -> String {
        "fused rotary embedding".to_owned()
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let positions = self.positions.take();
        let owned = inputs.iter().map(|x| x.shallow_clone()).collect();
        let rotation = self.rotation(positions.as_ref(), self.inverse);
        let outputs = pass_for(self.table.device()).rotate(rotation, owned, false)?;
        if let Some(positions) = &positions {
            ctx.save(positions);
        }
        Ok(outputs)
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let positions = ctx.take_saved().pop();
        if self.given && positions.is_none() {
            return Err(Error::invalid(NAME, "the positions that forward saved are gone"));
        }
        let mut results: Vec<Option<Tensor>> = grads.iter().map(|_| None).collect();
        let (mut indices, mut upstream) = (Vec::new(), Vec::new());
        for (index, grad) in grads.into_iter().enumerate() {
            if let Some(grad) = grad.filter(|_| ctx.needs_input_grad(index)) {
                indices.push(index);
                upstream.push(grad);
            }
        }
        let turned = if ctx.is_recorded() {
            let back = Self::new(&self.table, positions.as_ref(), !self.inverse)?;
            autograd::apply_any(back, &upstream.iter().collect::<Vec<_>>())?
        } else {
            let rotation = self.rotation(positions.as_ref(), !self.inverse);
            pass_for(self.table.device()).rotate(rotation, upstream, true)?
        };
        for (index, gradient) in indices.into_iter().zip(turned) {
            results[index] = Some(gradient);
        }
        Ok(results)
    }
}
