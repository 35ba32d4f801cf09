//! The host sums of a layer's gradients, and how they relate to `.grad`.

use runtime::autograd::{GradMode, set_grad};
use tch::Tensor;

use super::Layer;
use crate::error::Result;

impl Layer {
    /// Returns the current sum of a tensor's gradients, and what autograd has added since the last call. Clears `.grad`.
    pub(crate) fn sum(&mut self, index: usize) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let tensor = &self.tensors[index];
        let gradient = tensor.f_grad()?;
        let gradient = gradient.defined().then_some(gradient);
        if gradient.is_some() {
            set_grad(tensor, None)?;
        }
        Ok(match &self.pending[index] {
            Some(pending) => (Some(pending.shallow_clone()), gradient),
            None => {
                self.pending[index] = gradient.as_ref().map(Tensor::shallow_clone);
                (gradient, None)
            }
        })
    }

    /// Whether a tensor has a gradient.
    pub(crate) fn has_gradient(&self, index: usize) -> Result<bool> {
        Ok(self.pending[index].is_some() || self.tensors[index].f_grad()?.defined())
    }

    /// Takes the gradient sum of a tensor.
    pub(crate) fn take_gradient(&mut self, index: usize) -> Result<Option<Tensor>> {
        let (sum, other) = self.sum(index)?;
        self.pending[index] = None;
        if let (Some(sum), Some(other)) = (&sum, other) {
            for event in &self.arrived {
                event.synchronize()?;
            }
            let _no_grad = GradMode::off();
            let _ = sum.shallow_clone().f_add_(&other)?;
        }
        Ok(sum)
    }
}
