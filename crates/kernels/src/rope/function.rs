//! The rotation as an autograd function.

use runtime::autograd::{self, Backward, Forward, Function};
use runtime::tensor_memory::{Dense, dense};
use runtime::{Error, Result};
use smallvec::SmallVec;
use tch::{Device, Tensor};

use super::{NAME, Rotation, pass_for};

/// Inputs: any number of tensors of heads. Outputs: the same, rotated.
pub(super) struct Rotate {
    table: Tensor,
    device: Device,
    /// Used by forward; backward gets them from libtorch, which detects changes in between.
    positions: Option<Tensor>,
    given: bool,
    inverse: bool,
}

impl Rotate {
    pub(super) fn new(
        table: Tensor,
        device: Device,
        positions: Option<&Tensor>,
        inverse: bool,
    ) -> Result<Self> {
        let positions = positions.map(dense).transpose()?.map(Dense::into_tensor);
        Ok(Self { table, device, given: positions.is_some(), positions, inverse })
    }

    fn rotation<'a>(&'a self, positions: Option<&'a Tensor>, inverse: bool) -> Rotation<'a> {
        Rotation { table: &self.table, positions, inverse }
    }
}

impl Function for Rotate {
    const TWICE_DIFFERENTIABLE: bool = true;

    fn name(&self) -> &'static str {
        "fused rotary embedding"
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let positions = self.positions.take();
        let rotation = self.rotation(positions.as_ref(), self.inverse);
        let outputs = pass_for(self.device).rotate(rotation, inputs, false)?;
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
        let (mut indices, mut upstream) = (SmallVec::<[usize; 2]>::new(), SmallVec::<[Tensor; 2]>::new());
        for (index, grad) in grads.into_iter().enumerate() {
            if let Some(grad) = grad.filter(|_| ctx.needs_input_grad(index)) {
                indices.push(index);
                upstream.push(grad);
            }
        }
        let upstream: SmallVec<[&Tensor; 2]> = upstream.iter().collect();
        let turned = if ctx.is_recorded() {
            let table = self.table.shallow_clone();
            let back = Self::new(table, self.device, positions.as_ref(), !self.inverse)?;
            autograd::apply_any(back, &upstream)?
        } else {
            let rotation = self.rotation(positions.as_ref(), !self.inverse);
            pass_for(self.device).rotate(rotation, &upstream, true)?
        };
        for (index, gradient) in indices.into_iter().zip(turned) {
            results[index] = Some(gradient);
        }
        Ok(results)
    }
}
