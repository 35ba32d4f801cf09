//! What a step consists of: sizes of the layers and of the fixed part, working memory, seconds, rates.

use crate::{Error, exact};

/// One layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Layer {
    /// Bytes of its flat buffer, all regions: what a load moves and a slot holds.
    pub slot_bytes: u64,
    /// Bytes of its trainable weights in that buffer; 0: frozen.
    pub trainable_bytes: u64,
    /// Bytes of their gradients.
    pub gradient_bytes: u64,
    /// Bytes of their master weights and optimizer state.
    pub state_bytes: u64,
    /// How many trainable numbers they are.
    pub trainable: u64,
    /// Seconds of its forward.
    pub forward_seconds: f64,
    /// Seconds of its backward, with the forward that is computed again. Not read in inference.
    pub backward_seconds: f64,
    /// What it keeps where it is resident and not computed again; `None`: as [`Working::kept`] says. An activation plan that
    /// differs from layer to layer.
    pub kept: Option<Kept>,
}

/// What stays on the device whatever the method: embedding, last norm, head.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fixed {
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// Bytes of the gradients, all of which are there from the embedding's backward on.
    pub gradient_bytes: u64,
    /// Bytes of those that are there from the loss on: the last norm's and the output matrix', which is the embedding's where they are
    /// tied.
    pub head_gradient_bytes: u64,
    /// Bytes of master weights and optimizer state.
    pub state_bytes: u64,
    /// How many trainable numbers they are.
    pub trainable: u64,
    /// Seconds of embedding, head and loss, forward and (in training) backward.
    pub seconds: f64,
}

/// What passes on the device while a step runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Working {
    /// Bytes of one layer's input; of a training step with recomputation, every layer's is kept.
    pub input_bytes: u64,
    /// The most bytes of a layer's forward that keeps nothing, beyond its weights and its input.
    pub forward_bytes: u64,
    /// The most bytes of a layer's recomputation and backward, beyond its weights and its input: its weights' gradients as they come
    /// are among them.
    pub backward_bytes: u64,
    /// The most bytes of head and loss, beyond the layers' inputs: the output matrix' gradient is among them.
    pub head_bytes: u64,
    /// The most bytes of the embedding's backward, beyond [`Fixed::gradient_bytes`].
    pub embedding_bytes: u64,
    /// Bytes that are there from begin to end: tokens, labels, angles of positions, a workspace.
    pub constant_bytes: u64,
    /// A layer that keeps its activations; only [`Method::Resident`](super::Method::Resident) without recomputation reads it.
    pub kept: Option<Kept>,
}

/// A layer of which nothing is computed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Bytes that it keeps between its passes, its input among them.
    pub bytes: u64,
    /// The most bytes of its forward, its input and what it comes to keep among them.
    pub forward_bytes: u64,
    /// The most bytes of its backward beyond those that it keeps, its weights' gradients as they come among them.
    pub backward_bytes: u64,
}

/// A step of a decoder.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Job {
    /// In the order of the forward.
    pub layers: Vec<Layer>,
    /// What is on the device all the time.
    pub fixed: Fixed,
    /// What passes.
    pub working: Working,
    /// Whether a backward and an optimizer's step follow; else a step is one forward.
    pub training: bool,
}

impl Job {
    /// Whether the optimizer has anything to do in a step.
    pub fn updates(&self) -> bool {
        self.training && (self.fixed.trainable > 0 || self.layers.iter().any(|layer| layer.trainable > 0))
    }

    /// Bytes of all layers' flat buffers.
    pub fn layer_bytes(&self) -> Result<u64, Error> {
        exact::sum("bytes of all layers", self.layers.iter().map(|layer| layer.slot_bytes))
    }

    /// Bytes of master weights and optimizer state, of layers and fixed part.
    pub fn state_bytes(&self) -> Result<u64, Error> {
        let layers = self.layers.iter().map(|layer| layer.state_bytes);
        exact::sum("bytes of the optimizer's state", layers.chain([self.fixed.state_bytes]))
    }
}

/// Bytes of memory that a step of AdamW moves for each number, in fp32: gradient, weight and two moments are read, and the last three
/// written. A step is one pass over memory, so that its rate is the memory's by these.
pub const ADAMW_STEP_BYTES: f64 = 28.0;

/// How fast bytes move and an optimizer steps. All positive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Bytes per second from the host or file to the device.
    pub load: f64,
    /// Bytes per second from the device to the host.
    pub store: f64,
    /// Trainable numbers per second of a step on the host.
    pub host_optimizer: f64,
    /// Trainable numbers per second of a step on the device.
    pub device_optimizer: f64,
}

impl Rates {
    /// A link that is as fast both ways, and an AdamW that steps as fast as the memory of where it is: all in bytes per second.
    pub const fn of_memory(link: f64, host_bandwidth: f64, device_bandwidth: f64) -> Self {
        Self {
            load: link,
            store: link,
            host_optimizer: host_bandwidth / ADAMW_STEP_BYTES,
            device_optimizer: device_bandwidth / ADAMW_STEP_BYTES,
        }
    }
}
