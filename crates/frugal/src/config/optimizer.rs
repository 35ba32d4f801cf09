//! The optimizer of a training.

use serde::{Deserialize, Serialize};
use tch::Tensor;
use training::optimizer::{
    AdaGrad, Adafactor, Adam, AdamW, AdamW8bit, Extent, Group, Lion, Momentum, Muon, Nesterov, RmsProp, Rule,
    Sgd,
};
use training::schedule::Shape;

use super::master_weights::MasterWeights;
use super::zero_stage::ZeroStage;

/// The optimizer of a training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// The update rule, with its usual coefficients.
    pub rule: OptimizerRule,
    /// Learning rate after warm-up.
    pub lr: f64,
    /// The learning-rate schedule after warm-up: `constant`, or `linear` or `cosine` to 0 at the last step.
    pub schedule: Shape,
    /// Warm-up: below 1 a share of all steps, from 1 on a number of steps.
    pub warmup: f64,
    /// Weight decay of matrices: an L2 penalty for SGD, momentum, Nesterov, AdaGrad, RMSProp and Adam, and decoupled for the others.
    pub weight_decay: f64,
    /// Maximum gradient norm; 0 for no clipping. A step whose loss or gradients are not finite is skipped; without clipping and with the
    /// optimizer on the host, or with updates during backward, it ends the training.
    pub clip: f64,
    /// Storage of the optimizer state of offloaded layers, and the device that updates it.
    pub place: OptimizerPlace,
    /// Whether each weight is updated during backward, as soon as its gradient is complete, and the gradient is freed: the gradients of a
    /// whole model are never in memory at once. A step then has one micro-batch and no clipping, and one that is not finite ends the training.
    pub in_backward: bool,
    /// Handling of updates smaller than the last digit of trained bf16 and fp16 weights: `true` keeps fp32 copies (4 bytes each),
    /// `"stochastic"` rounds at random, `false` loses such updates, and `"auto"` keeps copies where memory allows, else it rounds at random.
    pub master_weights: MasterWeights,
    /// ZeRO stage of a training over several ranks: 1 divides the optimizer state, 2 the gradients too, 3 the layers' weights too; `"auto"`
    /// leaves it to the plan. It changes no bit of the result.
    pub zero_stage: ZeroStage,
    /// Replicas of what ranks divide (hybrid sharding): the number of ranks is a multiple of it.
    pub replicas: usize,
    /// Storage of the frozen weights of layers in ZeRO stage 3.
    pub frozen_weights: FrozenPlace,
    /// The order in which gradients are summed over ranks.
    pub reduction: ReductionOrder,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            rule: OptimizerRule::default(),
            lr: 2e-4,
            schedule: Shape::Cosine,
            warmup: 0.03,
            weight_decay: 0.0,
            clip: 1.0,
            place: OptimizerPlace::default(),
            in_backward: false,
            master_weights: MasterWeights::default(),
            zero_stage: ZeroStage::default(),
            replicas: 1,
            frozen_weights: FrozenPlace::default(),
            reduction: ReductionOrder::default(),
        }
    }
}

impl OptimizerConfig {
    /// Returns the warm-up steps of a training of `steps`. A share leaves at least one step for the schedule.
    pub fn warmup_steps(&self, steps: u64) -> u64 {
        if self.warmup < 1.0 {
            ((self.warmup * steps as f64).ceil() as u64).min(steps.saturating_sub(1))
        } else {
            self.warmup.ceil() as u64
        }
    }
}

/// An update rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "clap", value(rename_all = "lower"))]
pub enum OptimizerRule {
    /// Stochastic gradient descent.
    Sgd,
    /// SGD with momentum.
    Momentum,
    /// SGD with Nesterov momentum.
    Nesterov,
    /// AdaGrad.
    AdaGrad,
    /// RMSProp.
    RmsProp,
    /// Adam.
    Adam,
    /// AdamW.
    #[default]
    AdamW,
    /// AdamW with its state in 8 bits, a quarter of the memory.
    AdamW8bit,
    /// Lion, with half of AdamW's state: the sign of a momentum.
    Lion,
    /// Adafactor, with a state of a few numbers per row and column of a matrix.
    Adafactor,
    /// Muon for the matrices between embedding and head, with half of AdamW's state, and AdamW for all other weights.
    Muon,
}

impl OptimizerRule {
    /// Returns the rule with its usual coefficients.
    pub fn rule(self) -> Box<dyn Rule> {
        match self {
            Self::Sgd => Box::new(Sgd),
            Self::Momentum => Box::new(Momentum::default()),
            Self::Nesterov => Box::new(Nesterov::default()),
            Self::AdaGrad => Box::new(AdaGrad::default()),
            Self::RmsProp => Box::new(RmsProp::default()),
            Self::Adam => Box::new(Adam::default()),
            Self::AdamW => Box::new(AdamW::default()),
            Self::AdamW8bit => Box::new(AdamW8bit::default()),
            Self::Lion => Box::new(Lion::default()),
            Self::Adafactor => Box::new(Adafactor::default()),
            Self::Muon => Box::new(Muon::default()),
        }
    }

    /// Returns a model's parameters in groups: matrices decay, vectors do not, and Muon has the matrices that it is for in one of its own.
    pub fn groups<'a>(
        self,
        parameters: impl IntoIterator<Item = (String, &'a Tensor)>,
        lr: f64,
        weight_decay: f64,
    ) -> Vec<Group> {
        match self {
            Self::Muon => Muon::groups(parameters, lr, weight_decay, AdamW::default()),
            _ => Group::by_dimension(parameters, lr, weight_decay),
        }
    }

    /// Returns the bytes of state of a parameter, with its sizes and the name that it has in the model; of an fp64 one, half of them.
    pub fn state_bytes(self, name: &str, shape: &[i64]) -> u64 {
        let rule = match self {
            Self::Muon if !Muon::is_hidden(name, shape.len()) => Self::AdamW,
            own => own,
        };
        rule.rule().slots(Extent::of(shape)).iter().map(|slot| slot.bytes(tch::Kind::Float)).sum()
    }

    /// Returns whether the update of a weight depends on all others of its tensor, so that ranks cannot divide it.
    pub fn updates_whole_tensors(self) -> bool {
        self.rule().granularity().is_none()
    }

    /// The factors of AdamW's learning rate and weight decay by default. Lion moves every weight by the whole learning rate: its authors take
    /// a third to a tenth of AdamW's, and as many times its weight decay (arXiv:2302.06675, section 5).
    pub(super) fn default_factors(self) -> [f64; 2] {
        match self {
            Self::Lion => [0.2, 5.0],
            _ => [1.0, 1.0],
        }
    }
}

/// The name in a configuration.
impl std::fmt::Display for OptimizerRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// Storage of the frozen weights of layers in ZeRO stage 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FrozenPlace {
    /// On every rank, in the tier of `offload`: they are never sent.
    Whole,
    /// Divided among ranks.
    #[default]
    Sharded,
}

/// The order in which gradients are summed over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReductionOrder {
    /// That of the micro-batches, in fp32: the same bits at any number of ranks. Between machines of several ranks each, more bytes are sent
    /// than a ring sends.
    #[default]
    Ordered,
    /// That of the backend's own collectives, in the gradients' dtype: the bits depend on the number of ranks. With NCCL it sends fewer
    /// bytes between machines; Gloo's takes more than twice the time of the ordered one.
    Native,
}

/// Storage of the optimizer state of offloaded layers, and the device that updates it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum OptimizerPlace {
    /// On the device, beside the weights.
    #[default]
    Device,
    /// In host memory, or in files with the layers (`offload.tier`); layers are updated there during backward (ZeRO-Offload).
    Host,
}
