//! What a step consists of: sizes of the layers and of the fixed part, working memory, seconds, rates.

use super::schedule::{Method, Setup};
use crate::exact::{self, positive};
use crate::{Error, activation_plan::LONGEST_SECONDS};

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
}

/// What stays on the device whatever the method: embedding, last norm, head.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fixed {
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// Bytes of those that are trained; 0: all frozen.
    pub trainable_bytes: u64,
    /// Bytes of the gradients, which are there for the whole step.
    pub gradient_bytes: u64,
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
    /// The most bytes of a layer's recomputation and backward, beyond its weights, its input and its weights' gradients.
    pub backward_bytes: u64,
    /// The most bytes of head and loss, beyond the layers' inputs.
    pub head_bytes: u64,
    /// Bytes that are there from begin to end: tokens, labels, angles of positions, a workspace.
    pub constant_bytes: u64,
    /// A layer that keeps its activations; only [`Method::Resident`] without recomputation reads it.
    pub kept: Option<Kept>,
}

/// A layer of which nothing is computed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Bytes that it keeps between its passes, its input among them.
    pub bytes: u64,
    /// The most bytes of its forward beyond those.
    pub forward_bytes: u64,
    /// The most bytes of its backward beyond those and its weights' gradients.
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

    pub(super) fn check(&self, rates: &Rates, setup: &Setup) -> Result<(), Error> {
        positive("layers of a step", self.layers.len() as u64)?;
        for rate in [rates.load, rates.store, rates.host_optimizer, rates.device_optimizer] {
            if !(rate > 0.0 && rate.is_finite()) {
                return Err(Error::OutOfRange {
                    what: "a rate",
                    given: rate,
                    range: "the positive numbers",
                    remedy: "give bytes per second of the link and numbers per second of the optimizer, as measured",
                });
            }
        }
        let layers = self.layers.iter().flat_map(|layer| [layer.forward_seconds, layer.backward_seconds]);
        for seconds in layers.chain([self.fixed.seconds]) {
            if !(0.0..=LONGEST_SECONDS).contains(&seconds) {
                return Err(Error::OutOfRange {
                    what: "a layer's time in seconds",
                    given: seconds,
                    range: "0 to 1e9",
                    remedy: "give seconds as measured, or FLOPs by a positive rate",
                });
            }
        }
        if let Method::Overlap { ring } = setup.method
            && !(1..=super::MOST_SLOTS).contains(&ring)
        {
            return Err(Error::OutOfRange {
                what: "the number of slots of the ring",
                given: ring as f64,
                range: "1 to 8",
                remedy: "give 1 (no prefetch) to 8",
            });
        }
        let is_risen = setup.resident.windows(2).all(|pair| pair[0] < pair[1]);
        match setup.resident.last() {
            Some(last) if !is_risen || *last >= self.layers.len() => Err(Error::Shape {
                what: format!("resident layers {:?} of {} layers", setup.resident, self.layers.len()),
                remedy: "name each layer once, in rising order, from 0 on".into(),
            }),
            _ => Ok(()),
        }
    }
}

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
