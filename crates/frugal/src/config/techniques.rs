//! The techniques that change what a step keeps, where, and in which precision.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Bytes;

/// Activations that the MLPs keep for backward.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MlpConfig {
    /// A checkpoint level of `swiglu-ckpt`: `save-all`, `save-gate-up`, `save-one`, `input-only` or `input-only-tiled:SIZE`;
    /// absent for the model's own MLP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
}

/// Computation of the loss.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossConfig {
    /// Loss head.
    pub head: LossHeadKind,
    /// Tokens whose logits exist at a time in the fused loss; absent for `chunk_bytes`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk_tokens: Option<i64>,
    /// Bytes of logits that exist at a time in the fused loss; absent for 128 MiB on a CPU, and on a GPU for
    /// 1 GiB or one chunk that takes no more memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk_bytes: Option<Bytes>,
    /// Computes the fused loss's gradients in backward, from logits computed again: one product more, and less memory between
    /// the passes.
    pub gradients_in_backward: bool,
    /// Coefficient of the load-balancing loss of a mixture of experts, transformers' `router_aux_loss_coef`; absent or 0 for none.
    /// [`models::RouterBalance`] has the mathematics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_aux_loss: Option<f64>,
}

/// A loss head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum LossHeadKind {
    /// fused, or plain if the head has an adapter.
    #[default]
    Auto,
    /// All logits at once, then cross-entropy.
    Plain,
    /// Output projection and cross-entropy as one operation, over a chunk of logits at a time.
    Fused,
}

/// Activations that the layers keep for backward.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ActivationsConfig {
    /// Layers that keep their activations.
    pub plan: ActivationPlan,
    /// Part that a layer without kept activations recomputes.
    pub recompute: Recomputed,
    /// k of `every-k`: every k-th layer does not keep its activations.
    pub every: usize,
    /// Bytes that a step may take on the device, for `plan`; absent for `training.budget`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Bytes>,
}

impl Default for ActivationsConfig {
    fn default() -> Self {
        Self { plan: ActivationPlan::default(), recompute: Recomputed::default(), every: 2, budget: None }
    }
}

/// Layers that keep their activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum ActivationPlan {
    /// The fastest plan that fits the budget; it may also offload layers or take fewer rows at a time.
    #[default]
    Auto,
    /// All layers.
    Keep,
    /// No layer: activation checkpointing.
    Recompute,
    /// All but every k-th layer (k is `activations.every` of the configuration, 2 by default).
    EveryK,
    /// As many as fit the budget, with the least recomputation by measured costs.
    Plan,
}

/// Part that a layer without kept activations recomputes in backward. Gradients have the same bits with each, on a GPU up to the order of
/// sums in the backward pass of attention ([`kernels::attention::backend`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Recomputed {
    /// The whole layer; its input is kept.
    #[default]
    Layer,
    /// Norms, activation functions, dropout and sums; the results of matrix products and attention are kept.
    Elementwise,
    /// The MLP.
    Mlp,
    /// The attention.
    Attention,
    /// The whole layer; its input is offloaded to host memory, also where its weights are offloaded.
    Offload,
}

/// Weight offloading.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OffloadConfig {
    /// Storage of offloaded layers.
    pub tier: OffloadTier,
    /// Transfer method.
    pub method: OffloadMethod,
    /// Layers on the device at a time, for `overlap`: 1 has no overlap, 3 are one that runs and two in transfer.
    pub ring: usize,
    /// Layers that stay on the device, by number.
    pub resident: Vec<usize>,
    /// Layers that keep their activations, by number. Default: the layers that `activations.plan` keeps; with `auto`, as many as the budget
    /// of a planned step holds, and none without a plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep: Option<Vec<usize>>,
    /// Page-locks the host's memory where the device is a GPU.
    pub pinned: bool,
    /// Folder for the files of the tier `file` where the model has none of its own; absent for the system's temporary folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<PathBuf>,
}

impl Default for OffloadConfig {
    fn default() -> Self {
        Self {
            tier: OffloadTier::default(),
            method: OffloadMethod::default(),
            ring: 3,
            resident: Vec::new(),
            keep: None,
            pinned: true,
            folder: None,
        }
    }
}

/// Streaming of the experts of a mixture from files: those that a batch's tokens are given to are loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExpertsConfig {
    /// Bytes of the experts of all layers that are in memory at a time.
    pub cache: Bytes,
    /// Folder for the files of experts that the model has in another dtype; absent for the system's temporary folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<PathBuf>,
}

impl Default for ExpertsConfig {
    /// 1 GiB.
    fn default() -> Self {
        Self { cache: Bytes(1 << 30), folder: None }
    }
}

/// Storage of offloaded layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum OffloadTier {
    /// Host memory.
    #[default]
    Host,
    /// Files; frozen layers of a model in Hugging Face's layout are read from its own. Trained layers are in files together with the sums of
    /// their gradients and the optimizer's state (ZeRO-Infinity), with `optimizer.place = "host"`.
    File,
}

/// Transfer method of offloaded layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum OffloadMethod {
    /// One layer at a time, without a backward: inference only.
    OneLayer,
    /// One layer at a time, as a recomputed segment; for comparison.
    Checkpointing,
    /// One layer at a time, as an autograd function with its own backward; for comparison.
    Function,
    /// The next layers are prefetched while one runs: the fastest.
    #[default]
    Overlap,
}

/// Mixed precision.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrecisionConfig {
    /// The precision of products.
    pub compute: Compute,
    /// The loss scaler of fp16; absent for a dynamic one with its usual constants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaler: Option<ScalerConfig>,
}

/// The precision of products. Weights, gradients, norms, softmax and losses stay as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    /// No autocast: the dtype of the weights.
    #[default]
    Fp32,
    /// bfloat16.
    Bf16,
    /// IEEE half, with a dynamic loss scaler unless the configuration has another.
    Fp16,
    /// fp8 in linear layers, with a scale per tensor; bf16 elsewhere.
    Fp8,
}

/// A loss scaler.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum ScalerConfig {
    /// A scale that falls at an overflow and grows after many steps without.
    Dynamic {
        /// The first scale.
        #[serde(default = "default_init_scale")]
        init_scale: f32,
        /// Factor of the scale after `growth_interval` steps without an overflow.
        #[serde(default = "default_growth_factor")]
        growth_factor: f64,
        /// Factor of the scale after an overflow.
        #[serde(default = "default_backoff_factor")]
        backoff_factor: f64,
        /// Steps without an overflow until the scale grows.
        #[serde(default = "default_growth_interval")]
        growth_interval: u32,
    },
    /// One scale for the whole training.
    Static {
        /// The scale.
        scale: f32,
    },
}

fn default_init_scale() -> f32 {
    amp::DynamicScalerConfig::default().init_scale
}

fn default_growth_factor() -> f64 {
    amp::DynamicScalerConfig::default().growth_factor
}

fn default_backoff_factor() -> f64 {
    amp::DynamicScalerConfig::default().backoff_factor
}

fn default_growth_interval() -> u32 {
    amp::DynamicScalerConfig::default().growth_interval
}

impl Default for ScalerConfig {
    fn default() -> Self {
        Self::Dynamic {
            init_scale: default_init_scale(),
            growth_factor: default_growth_factor(),
            backoff_factor: default_backoff_factor(),
            growth_interval: default_growth_interval(),
        }
    }
}
