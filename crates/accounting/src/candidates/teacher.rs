//! A frozen model that reads the tokens of each pass before it, and whose distributions the loss compares with.
//!
//! During the whole step the device holds its weights, or of offloaded layers a ring. Its forward comes before the pass: a layer's input and working
//! bytes, beside what there is between steps. From then to the loss there is one hidden state for each position, and in the loss tiles of logits
//! besides the student's ([`Choices::further_tiles`]).

use super::{Batch, Job};
use crate::Decoder;
use crate::Error;
use crate::exact::{product, sum};
use crate::memory::Item;
use crate::offload::sizes::{self, Choices};
use crate::offload::{BETWEEN_STEPS, Footprint, Moment, StepCosts};

const WHAT: &str = "bytes of the teacher";
const WEIGHTS: &str = "teacher";

/// A teacher.
#[derive(Clone, Debug, PartialEq)]
pub struct Teacher {
    /// The model.
    pub model: Decoder,
    /// Number formats and rate of products.
    pub choices: Choices,
    /// Layers on the device at a time; `None` for all.
    pub ring: Option<usize>,
    /// Bytes per second at which offloaded layers are loaded.
    pub load: f64,
    /// Whether offloaded layers are in host memory, and not in files.
    pub on_host: bool,
}

impl Teacher {
    fn costs(&self, pass: Batch) -> Result<StepCosts, Error> {
        sizes::inference(&self.model, pass.work, &self.choices)
    }

    /// Bytes on the device during the whole step, and in host memory.
    pub(super) fn weights(&self, pass: Batch) -> Result<[u64; 2], Error> {
        let costs = self.costs(pass)?;
        let layers = costs.layer_bytes()?;
        let largest = costs.layers.iter().map(|layer| layer.slot_bytes).max().unwrap_or(0);
        let (on_device, on_host) = match self.ring {
            None => (layers, 0),
            Some(ring) => {
                let slots = product(WHAT, &[ring.min(costs.layers.len()) as u64, largest])?;
                (slots, if self.on_host { layers } else { 0 })
            }
        };
        Ok([sum(WHAT, [costs.fixed.weight_bytes, on_device])?, on_host])
    }

    /// Bytes of the hidden states that the loss reads.
    pub(super) fn hidden(&self, pass: Batch) -> Result<u64, Error> {
        Ok(self.costs(pass)?.working.input_bytes)
    }

    /// Bytes of its forward beside its weights.
    fn forward(&self, pass: Batch) -> Result<u64, Error> {
        let working = self.costs(pass)?.working;
        sum(
            WHAT,
            [working.input_bytes, working.forward_bytes.max(working.input_bytes), working.constant_bytes],
        )
    }

    /// Seconds of its forward, whose logits are made of the labelled positions.
    pub(super) fn seconds(&self, pass: Batch) -> Result<f64, Error> {
        let costs = self.costs(pass)?;
        let share = match pass.labelled {
            Some(labelled) => labelled as f64 / pass.work.tokens()? as f64,
            None => 1.0,
        };
        let layers: f64 = costs.layers.iter().map(|layer| layer.forward_seconds).sum();
        let loads = match self.ring {
            Some(_) => costs.layer_bytes()? as f64 / self.load,
            None => 0.0,
        };
        Ok(layers.max(loads) + share * costs.fixed.seconds)
    }
}

impl Job {
    /// Adds what the teacher takes on the device while the student's pass runs.
    pub(super) fn with_teacher(&self, mut costs: StepCosts, pass: Batch) -> Result<StepCosts, Error> {
        let Some(teacher) = &self.teacher else { return Ok(costs) };
        let hidden = teacher.hidden(pass)?;
        let add = |bytes: &mut u64| -> Result<(), Error> {
            *bytes = sum(WHAT, [*bytes, hidden])?;
            Ok(())
        };
        let working = &mut costs.working;
        working.constant_bytes = sum(WHAT, [working.constant_bytes, teacher.weights(pass)?[0]])?;
        add(&mut working.forward_bytes)?;
        add(&mut working.head_bytes)?;
        if let Some(kept) = &mut working.kept {
            add(&mut kept.forward_bytes)?;
        }
        for kept in costs.layers.iter_mut().filter_map(|layer| layer.kept.as_mut()) {
            add(&mut kept.forward_bytes)?;
        }
        Ok(costs)
    }

    /// Returns the larger of a pass's peak and of that of the teacher's forward before it; the teacher's weights are a part of their own.
    pub(super) fn or_teacher(&self, peak: Footprint, pass: Batch) -> Result<Footprint, Error> {
        let Some(teacher) = &self.teacher else { return Ok(peak) };
        let mut parts: Vec<Item> = peak
            .parts
            .iter()
            .filter(|part| {
                BETWEEN_STEPS.contains(&part.name)
                    || part.name == "gradients"
                    || part.name == "offloaded layers"
            })
            .cloned()
            .collect();
        parts.push(Item { name: "teacher's forward", bytes: teacher.forward(pass)? });
        let total = sum(WHAT, parts.iter().map(|part| part.bytes))?;
        let mut peak =
            if total > peak.total { Footprint { moment: Moment::Teacher, parts, total } } else { peak };
        let weights = teacher.weights(pass)?[0];
        if let Some(constant) = peak.parts.iter_mut().find(|part| part.name == "constant") {
            constant.bytes -= weights.min(constant.bytes);
            peak.parts.push(Item { name: WEIGHTS, bytes: weights });
        }
        Ok(peak)
    }
}
