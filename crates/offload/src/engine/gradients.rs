//! The gradients of a layer's backward, on their way to whoever consumes them.
//!
//! ```text
//! function (backward) → Engine::deliver → [HostAdamW: GradientConsumer::accept] → transfer → [its step → Engine::submit_update]
//! ```

use runtime::autograd::set_grad;
use tch::Tensor;

use super::Engine;
use crate::error::Result;

/// Gradients of a layer's tensors, by index, in host memory or on their way.
pub(crate) type Gradients = Vec<(usize, Tensor)>;

/// Consumes the gradients of a layer's backward.
pub(crate) trait GradientConsumer: Send + Sync {
    /// Takes the gradients of the layer's trained tensors, by index, on the device.
    fn accept(&self, engine: &Engine, layer: usize, gradients: Gradients) -> Result<()>;
}

impl Engine {
    /// Passes the gradients of `leaves` on after a layer's backward.
    pub(crate) fn deliver(&self, layer: usize, leaves: &[Tensor]) -> Result<()> {
        let trained: Vec<usize> = self.with_layers(|layers| layers[layer].trained().collect());
        let mut gradients = Vec::new();
        for index in trained {
            let gradient = leaves[index].f_grad()?;
            if gradient.defined() {
                set_grad(&leaves[index], None)?;
                gradients.push((index, gradient));
            }
        }
        let consumer = self.0.state.lock().consumer.clone();
        match consumer {
            Some(consumer) => consumer.accept(self, layer, gradients),
            None => self.accumulate(layer, gradients),
        }
    }
}
