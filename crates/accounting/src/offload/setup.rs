//! A method of offloading with its options.

use super::step_costs::{Layer, Rates, StepCosts};
use crate::exact::positive;
use crate::{Error, activation_plan::LONGEST_SECONDS};

/// How layers are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// All layers are on the device, with all gradients until the optimizer steps.
    Resident {
        /// Whether each layer keeps only its input. No effect in inference.
        recompute: bool,
    },
    /// A layer is loaded, computed and freed; nothing overlaps.
    OneAtATime,
    /// A ring of slots with prefetching.
    Overlap {
        /// Slots of the ring, 1 to [`MOST_SLOTS`](super::MOST_SLOTS).
        ring: usize,
    },
}

impl Method {
    /// Whether a layer keeps its activations, and is not recomputed.
    pub(super) fn keeps(self, layer: &Layer) -> bool {
        match self {
            Self::Resident { recompute } => !recompute,
            Self::OneAtATime => false,
            Self::Overlap { .. } => layer.kept.is_some(),
        }
    }
}

/// Where master weights and optimizer state are; each layer is updated there as its gradients arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerPlace {
    /// On the device: no gradient is stored, but the updated weights of streamed layers are.
    Device,
    /// On the host for streamed layers, whose gradients are stored; other parameters are updated on the device.
    Host,
}

/// A method with its options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setup {
    /// How layers are moved.
    pub method: Method,
    /// Resident layers, in rising order from 0. Ignored by [`Method::Resident`].
    pub resident: Vec<usize>,
    /// Where the optimizer is. No effect if nothing is trained.
    pub optimizer: OptimizerPlace,
}

/// The step that is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The first: no streamed layer is on the device.
    Cold,
    /// A later one, which starts with the slots of the previous step.
    Warm,
}

/// Refuses setups that cannot be simulated.
pub(super) fn check(costs: &StepCosts, rates: &Rates, setup: &Setup) -> Result<(), Error> {
    positive("layers of a step", costs.layers.len() as u64)?;
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
    let layers = costs.layers.iter().flat_map(|layer| [layer.forward_seconds, layer.backward_seconds]);
    for seconds in layers.chain([costs.fixed.seconds]) {
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
        Some(last) if !is_risen || *last >= costs.layers.len() => Err(Error::Shape {
            what: format!("resident layers {:?} of {} layers", setup.resident, costs.layers.len()),
            remedy: "name each layer once, in rising order, from 0 on".into(),
        }),
        _ => Ok(()),
    }
}
