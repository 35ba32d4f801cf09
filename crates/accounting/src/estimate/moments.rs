//! The moments of a step, with the bytes of each.

use crate::memory::Item;
use crate::memory::zero::ModelStates;
use crate::{Error, exact};

/// A part of a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Parameters that the forward reads.
    Parameters,
    /// Copies of weights that autocast makes.
    Casts,
    /// The optimizer's copy of the parameters.
    MasterWeights,
    /// The optimizer's state.
    OptimizerState,
    /// Gradients of parameters.
    Gradients,
    /// Activations that the forward keeps for the backward.
    Activations,
    /// Logits and temporaries of the loss.
    Logits,
    /// Temporaries.
    Temporaries,
}

impl Part {
    /// All parts, in the order of [`Budget::parts`].
    pub const ALL: [Self; 8] = [
        Self::Parameters,
        Self::Casts,
        Self::MasterWeights,
        Self::OptimizerState,
        Self::Gradients,
        Self::Activations,
        Self::Logits,
        Self::Temporaries,
    ];

    /// Returns a short name for tables and bars.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Casts => "autocast copies",
            Self::MasterWeights => "master weights",
            Self::OptimizerState => "optimizer state",
            Self::Gradients => "gradients",
            Self::Activations => "activations",
            Self::Logits => "logits and loss",
            Self::Temporaries => "temporaries",
        }
    }
}

/// A moment of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The loss, before its backward.
    Loss,
    /// The last block's backward, the first to run.
    LastBlock,
    /// The first block's backward, the last to run.
    FirstBlock,
    /// The embedding's backward.
    Embedding,
    /// The optimizer's step.
    Step,
}

impl Moment {
    /// Returns a short name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loss => "loss",
            Self::LastBlock => "last block's backward",
            Self::FirstBlock => "first block's backward",
            Self::Embedding => "embedding's backward",
            Self::Step => "optimizer step",
        }
    }
}

/// The budget of one moment of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// The moment.
    pub moment: Moment,
    /// Bytes of each part, in the order of [`Part::ALL`].
    pub parts: [u64; 8],
    /// The sum of the parts.
    pub total: u64,
}

impl Budget {
    pub(crate) fn new(moment: Moment, parts: [u64; 8]) -> Result<Self, Error> {
        Ok(Self { moment, parts, total: exact::sum("bytes of a training step", parts)? })
    }

    /// Returns the budget with additional bytes of one part.
    pub(crate) fn with(self, part: Part, bytes: u64) -> Result<Self, Error> {
        let mut parts = self.parts;
        parts[part as usize] = exact::sum("bytes of a training step", [self.bytes(part), bytes])?;
        Self::new(self.moment, parts)
    }

    /// Returns the bytes of one part.
    pub fn bytes(&self, part: Part) -> u64 {
        self.parts[part as usize]
    }
}

/// The estimate of a training step on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Number of parameters, of the whole model.
    pub parameters: u64,
    /// Bytes on the device between steps.
    pub states: ModelStates,
    /// Tensors that one block keeps.
    pub block: Vec<Item>,
    /// Tensors kept outside the blocks.
    pub outside_blocks: Vec<Item>,
    /// The five moments, in order.
    pub moments: [Budget; 5],
    /// Bytes on the host at the end of the forward; 0 unless the plan uses the host.
    pub host_bytes: u64,
}

impl Estimate {
    /// Returns the largest moment; the first of several.
    pub fn peak(&self) -> &Budget {
        let mut peak = &self.moments[0];
        for budget in &self.moments[1..] {
            if budget.total > peak.total {
                peak = budget;
            }
        }
        peak
    }

    /// Returns one moment of the step.
    pub fn at(&self, moment: Moment) -> &Budget {
        &self.moments[moment as usize]
    }

    /// Returns the maximum of one part over all moments, as profiles show it, where each part has its own peak.
    /// [`Budget::bytes`] of [`Estimate::peak`] is the part at the peak of the sum.
    pub fn largest(&self, part: Part) -> u64 {
        self.moments.iter().map(|budget| budget.bytes(part)).max().unwrap_or(0)
    }
}
