//! The peak of a step that `accounting` predicts, and the one that the allocator counts: a table over methods, rings, tiers,
//! activation plans, adapters and optimizer placement, on models of a few layers.

mod measure;
mod predict;
mod rows;

use models::DecoderConfig;
use offload::Method;
use tch::Kind;
use training::activations::LayerPlan;

pub use rows::{rows, rows_of_families};

/// The work of a step.
#[derive(Debug, Clone, PartialEq)]
pub enum Pass {
    /// Reads the batch and computes the logits of each row's last token.
    Inference,
    /// Trains all weights.
    Full,
    /// Trains adapters beside a frozen base.
    Adapters {
        /// Projections by their short names.
        targets: &'static [&'static str],
        /// Tensors of all experts of a layer.
        experts: &'static [&'static str],
        /// Width of the adapters.
        rank: i64,
        /// Probability that an adapter's input is dropped.
        dropout: f64,
        /// The kind of adapters.
        kind: AdapterKind,
    },
}

/// The kind of adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdapterKind {
    /// Low-rank terms.
    Lora,
    /// LoRA with a magnitude for each row.
    Dora,
    /// LoRA that begins at the principal components of the weights.
    Pissa,
}

impl AdapterKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Lora => "LoRA",
            Self::Dora => "DoRA",
            Self::Pissa => "PiSSA",
        }
    }
}

/// The place of the layers.
#[derive(Debug, Clone, PartialEq)]
pub enum Placement {
    /// On the device, under an activation plan.
    Resident(Vec<LayerPlan>),
    /// In host memory or in files.
    Offloaded {
        /// How they come and go.
        method: Method,
        /// Slots of the ring.
        ring: usize,
        /// In files instead of the host's memory.
        in_files: bool,
        /// Layers that stay on the device.
        resident: Vec<usize>,
    },
}

/// The place of the optimizer's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptimizerPlace {
    /// Forward and backward alone.
    None,
    /// State and parameters on the device.
    Device,
    /// State on the host, with the layers.
    Host,
}

/// How the loss is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Head {
    /// All logits at once.
    Logits,
    /// So many tokens at a time.
    Chunks(i64),
}

/// A row of the table.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The name of the model and batch in the table.
    pub shape: &'static str,
    /// The model.
    pub config: DecoderConfig,
    /// Rows of a batch and tokens of a row.
    pub batch: [i64; 2],
    /// Dtype of the weights.
    pub kind: Kind,
    /// The work of a step.
    pub pass: Pass,
    /// The place of the layers.
    pub placement: Placement,
    /// The place of the optimizer's state.
    pub optimizer: OptimizerPlace,
    /// How the loss is computed.
    pub head: Head,
}

impl OptimizerPlace {
    /// A name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Device => "device",
            Self::Host => "host",
        }
    }
}

impl Row {
    /// The name of the step's work, for tables.
    pub fn pass_name(&self) -> String {
        match &self.pass {
            Pass::Inference => "inference".to_owned(),
            Pass::Full => "full training".to_owned(),
            Pass::Adapters { targets, experts, rank, dropout, kind } => {
                let kind = kind.name();
                let which = match targets.len() {
                    0 => "experts",
                    7 => "all projections",
                    _ if experts.is_empty() => "attention",
                    _ => "attention and experts",
                };
                let dropout = if *dropout > 0.0 { ", dropout" } else { "" };
                format!("{kind}, rank {rank}, {which}{dropout}")
            }
        }
    }

    /// How layers are kept or moved, the ring's slots and the tier, for tables.
    pub fn place_names(&self) -> [String; 3] {
        let none = || "–".to_owned();
        match &self.placement {
            Placement::Resident(plan) if plan.iter().all(|layer| *layer == plan[0]) => {
                [format!("resident, {}", plan[0]), none(), none()]
            }
            Placement::Resident(_) => ["resident, one plan for each layer".to_owned(), none(), none()],
            Placement::Offloaded { method, ring, in_files, resident } => {
                let some = if resident.is_empty() {
                    String::new()
                } else {
                    format!(", {} layers resident", resident.len())
                };
                let ring = if *method == Method::Overlap { ring.to_string() } else { none() };
                let tier = if *in_files { "file" } else { "host" };
                [format!("{}{some}", method.name()), ring, tier.to_owned()]
            }
        }
    }

    /// How the loss is computed, for tables.
    pub fn head_name(&self) -> String {
        match self.head {
            Head::Logits => "all logits".to_owned(),
            Head::Chunks(tokens) => format!("chunks of {tokens} tokens"),
        }
    }
}
