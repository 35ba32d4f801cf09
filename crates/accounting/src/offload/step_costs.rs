//! The costs of a step: sizes of the layers and of the fixed part, working memory, seconds, rates.

use crate::{Error, exact};

/// Costs of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Layer {
    /// Bytes of its flat buffer, all regions: the size of a load and of a slot.
    pub slot_bytes: u64,
    /// Bytes of its trainable weights in that buffer; 0: frozen.
    pub trainable_bytes: u64,
    /// Bytes of their gradients.
    pub gradient_bytes: u64,
    /// Bytes of their master weights and optimizer state.
    pub state_bytes: u64,
    /// Bytes of other layers' gradients on their way to other ranks during its backward.
    pub reducing_bytes: u64,
    /// Number of trainable parameters.
    pub trainable: u64,
    /// Seconds of its forward.
    pub forward_seconds: f64,
    /// Seconds of its backward, with recomputation. Ignored in inference.
    pub backward_seconds: f64,
    /// The activations that it keeps, for plans that differ between layers; it is not recomputed then. `None` for
    /// [`WorkingMemory::kept`] with [`Method::Resident`](super::Method::Resident) without recomputation, and for its input with
    /// [`Method::Overlap`](super::Method::Overlap). Other methods ignore it.
    pub kept: Option<Kept>,
}

/// The part that stays on the device with any method: embedding, last norm, head.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fixed {
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// Bytes of the gradients; all exist from the embedding's backward on.
    pub gradient_bytes: u64,
    /// Bytes of those that exist from the loss on: the last norm's and the output matrix', which is the embedding's if they are
    /// tied.
    pub head_gradient_bytes: u64,
    /// Whether gradients become sums of ranks, and are freed, before the optimizer steps.
    pub are_reduced: bool,
    /// Bytes of master weights and optimizer state.
    pub state_bytes: u64,
    /// Bytes of layers' gradients on their way to other ranks during the embedding's backward.
    pub reducing_bytes: u64,
    /// Number of trainable parameters.
    pub trainable: u64,
    /// Seconds of embedding, head and loss, forward and (in training) backward.
    pub seconds: f64,
}

/// Temporary memory on the device during a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkingMemory {
    /// Bytes of one layer's input; of a training step with recomputation, every layer's is kept.
    pub input_bytes: u64,
    /// Whether those inputs are kept in host memory: copied there while the layer runs, and back while the layer after it runs backward.
    pub inputs_on_host: bool,
    /// Maximum bytes of a layer's forward that keeps nothing, beyond its weights and its input.
    pub forward_bytes: u64,
    /// Maximum bytes of a layer's recomputation, beyond its weights and its input, including its output's gradient.
    pub recomputation_bytes: u64,
    /// Maximum bytes of a layer's recomputation and backward, beyond its weights and its input, including its weights'
    /// gradients.
    pub backward_bytes: u64,
    /// Maximum bytes of head and loss, beyond the layers' inputs, including the output matrix' gradient.
    pub head_bytes: u64,
    /// Maximum bytes of the embedding's backward, beyond [`Fixed::gradient_bytes`].
    pub embedding_bytes: u64,
    /// Maximum bytes of the optimizer's step on the device, beyond weights, gradients and state: copies in the dtype of its
    /// arithmetic.
    pub update_bytes: u64,
    /// Bytes during the whole step: tokens, labels, rotary angles, a workspace.
    pub constant_bytes: u64,
    /// A layer that keeps its activations; only [`Method::Resident`](super::Method::Resident) without recomputation reads it.
    pub kept: Option<Kept>,
}

/// A layer without recomputation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Bytes that it keeps between its passes, including its input.
    pub bytes: u64,
    /// Maximum bytes of its forward, including its input and the activations that it keeps.
    pub forward_bytes: u64,
    /// Maximum bytes of its backward beyond those that it keeps, including its weights' gradients.
    pub backward_bytes: u64,
}

/// The costs of a step of a decoder.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepCosts {
    /// The layers, in the order of forward.
    pub layers: Vec<Layer>,
    /// Tensors that are always on the device.
    pub fixed: Fixed,
    /// Temporary memory.
    pub working: WorkingMemory,
    /// Whether a backward and an optimizer step follow the forward.
    pub training: bool,
}

impl StepCosts {
    /// Makes each weight's update a part of the backward that completes its gradient, which is freed by it. The update of a weight in the
    /// layers takes `in_layers` bytes, of another one `outside`. `head_gradient` bytes exist from the loss to the embedding's backward: the output matrix' gradient where both are one tensor.
    pub(crate) fn update_in_backward(
        &mut self,
        [in_layers, outside]: [u64; 2],
        head_gradient: u64,
    ) -> Result<(), Error> {
        const WHAT: &str = "bytes of updates during backward";
        self.working.update_bytes = 0;
        let working = &mut self.working;
        for layer in &mut self.layers {
            layer.gradient_bytes = 0;
            if let Some(kept) = &mut layer.kept {
                kept.backward_bytes = exact::sum(WHAT, [kept.backward_bytes, in_layers])?;
            }
        }
        if let Some(kept) = &mut working.kept {
            kept.backward_bytes = exact::sum(WHAT, [kept.backward_bytes, in_layers])?;
        }
        working.backward_bytes = exact::sum(WHAT, [working.backward_bytes, in_layers])?;
        // The update follows the backward.
        working.embedding_bytes = working.embedding_bytes.max(outside);
        self.fixed.gradient_bytes -= self.fixed.head_gradient_bytes - head_gradient;
        self.fixed.head_gradient_bytes = head_gradient;
        Ok(())
    }

    /// Returns whether the optimizer has any parameters.
    pub fn updates(&self) -> bool {
        self.training && (self.fixed.trainable > 0 || self.layers.iter().any(|layer| layer.trainable > 0))
    }

    /// Returns the bytes of all layers' flat buffers.
    pub fn layer_bytes(&self) -> Result<u64, Error> {
        exact::sum("bytes of all layers", self.layers.iter().map(|layer| layer.slot_bytes))
    }

    /// Returns the bytes of master weights and optimizer state, of layers and fixed part.
    pub fn state_bytes(&self) -> Result<u64, Error> {
        let layers = self.layers.iter().map(|layer| layer.state_bytes);
        exact::sum("bytes of the optimizer's state", layers.chain([self.fixed.state_bytes]))
    }
}

/// Bytes that a step of AdamW moves per parameter, in fp32: it reads gradient, weight and two moments, and writes the last three. A
/// step is one pass over memory, so its rate is the memory bandwidth divided by these.
pub const ADAMW_STEP_BYTES: f64 = 28.0;

/// Rates of copying and of the optimizer. All positive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Bytes per second from the host or file to the device.
    pub load: f64,
    /// Bytes per second from the device to the host.
    pub store: f64,
    /// Parameters per second of a step on the host.
    pub host_optimizer: f64,
    /// Parameters per second of a step on the device.
    pub device_optimizer: f64,
}

impl Rates {
    /// Creates rates for a link that is as fast in both directions, and an AdamW at the memory bandwidth of its device: all in
    /// bytes per second.
    pub const fn of_memory(link: f64, host_bandwidth: f64, device_bandwidth: f64) -> Self {
        Self {
            load: link,
            store: link,
            host_optimizer: host_bandwidth / ADAMW_STEP_BYTES,
            device_optimizer: device_bandwidth / ADAMW_STEP_BYTES,
        }
    }
}
