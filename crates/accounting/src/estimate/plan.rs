//! The settings of a training.

use crate::decoder_flops::{Recomputation, Workload};
use crate::lora::LowRank;
use crate::memory::activations::ActivationChoices;
use crate::memory::host::OnHost;
use crate::memory::logits::Loss;
use crate::memory::optimizer::{Optimizer, StepKernel};
use crate::memory::recipe::Recipe;
use crate::memory::zero::Sharding;
use crate::recompute::{NormKernel, Recompute, SwigluLevel};

/// The settings of a training. Batches are per device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainingPlan {
    /// Sequences per device and their length.
    pub work: Workload,
    /// Number formats.
    pub recipe: Recipe,
    /// Optimizer.
    pub optimizer: Optimizer,
    /// The kernels of the optimizer's step.
    pub step: StepKernel,
    /// What the backward recomputes.
    pub recomputation: Recomputation,
    /// The implementation of an RMSNorm.
    pub norm: NormKernel,
    /// Whether dropout is on.
    pub dropout: bool,
    /// The implementation of the loss.
    pub loss: Loss,
    /// What data-parallel devices shard.
    pub sharding: Sharding,
    /// Whether gradients of an earlier batch exist while the next one runs.
    pub accumulate: bool,
    /// What is stored on the host.
    pub host: OnHost,
    /// Number of labelled tokens per step; `None` for all. A loss in chunks computes only these.
    pub labelled: Option<u64>,
    /// Adapters of a frozen base; `None` to train the whole model.
    pub lora: Option<LowRank>,
    /// Bytes that the device's libraries keep for matrix products throughout; 0 on a CPU.
    pub product_workspaces: u64,
}

impl Default for TrainingPlan {
    /// Returns one sequence of 1024 tokens, bf16 with fp32 master weights, AdamW, one device, no recomputation except a flash
    /// kernel's.
    fn default() -> Self {
        Self {
            work: Workload { batch: 1, sequence: 1024 },
            recipe: Recipe::default(),
            optimizer: Optimizer::default(),
            step: StepKernel::default(),
            recomputation: Recomputation::default(),
            norm: NormKernel::default(),
            dropout: false,
            loss: Loss::default(),
            sharding: Sharding::default(),
            accumulate: false,
            host: OnHost::default(),
            labelled: None,
            lora: None,
            product_workspaces: 0,
        }
    }
}

impl TrainingPlan {
    /// Returns the choices that affect activations.
    pub fn activation_choices(&self) -> ActivationChoices {
        ActivationChoices {
            recipe: self.recipe,
            recomputation: self.recomputation,
            norm: self.norm,
            dropout: self.dropout,
        }
    }

    /// Describes the settings in a line.
    pub fn summary(&self) -> String {
        let mut parts = vec![
            format!("batch {} × {} tokens", self.work.batch, self.work.sequence),
            self.recipe.name.to_owned(),
            self.optimizer.name().to_owned(),
            format!("{} attention", self.recomputation.attention.name()),
        ];
        if let Some(lora) = self.lora {
            parts.push(format!("adapters of rank {} on {}", lora.rank, lora.targets));
        }
        if self.recomputation.checkpoint != Recompute::None {
            parts.push(format!("{} recomputation", self.recomputation.checkpoint.name()));
        }
        if self.recomputation.swiglu != SwigluLevel::Eager {
            parts.push(format!("SwiGLU {}", self.recomputation.swiglu.name()));
        }
        if let Some(tokens) = self.loss.chunk() {
            parts.push(format!("{} in chunks of {tokens}", self.loss.name()));
        }
        if let Some(labelled) = self.labelled {
            parts.push(format!("{labelled} of them labelled"));
        }
        if self.host != OnHost::default() {
            parts.push(format!("{} on the host", self.host.names().join(" + ")));
        }
        if self.sharding.devices > 1 {
            parts.push(format!("ZeRO-{} on {} devices", self.sharding.stage.number(), self.sharding.devices));
        }
        parts.join(", ")
    }
}
