//! The gradients of a layer's backward, on their way to whoever consumes them.
//!
//! ```text
//! function (backward) → Engine::deliver → [HostAdamW: GradientConsumer::accept] → transfer → [its step → Engine::submit_update]
//! ```

use std::sync::atomic::Ordering;

use runtime::autograd::set_grad;
use tch::Tensor;

use super::Engine;
use crate::error::Result;
use crate::storage::Gradients;

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
        let (gradients, deliveries, last, consumer) = {
            let state = self.0.state.lock();
            let layer = &state.layers[layer];
            let (gradients, deliveries) = layer.deliveries(gradients)?;
            (gradients, deliveries, layer.outstanding.load(Ordering::Relaxed) == 0, state.consumer.clone())
        };
        let is_in_source = !deliveries.is_empty();
        deliveries.into_iter().try_for_each(|delivery| delivery.deliver(last))?;
        if is_in_source && gradients.is_empty() {
            return Ok(());
        }
        match consumer {
            Some(consumer) => consumer.accept(self, layer, gradients),
            None => self.accumulate(layer, gradients),
        }
    }
}
