//! Optimizers: the trait, and the standard implementation, a [`Rule`] over parameter groups.
//!
//! [`Optimizer`] is the trait that a [`Trainer`](crate::Trainer) uses. [`DeviceOptimizer`] keeps state and steps on the
//! parameters' device. `offload::HostAdamW` keeps them in host memory, and reads and writes the same checkpoints.
//!
//! With parameter θ, gradient g, learning rate η, weight decay λ, step number t from 1:
//!
//! | rule | update |
//! |---|---|
//! | [`Sgd`] | θ ← θ − η·g |
//! | [`Momentum`] | m ← μ·m + g; θ ← θ − η·m |
//! | [`Nesterov`] | m ← μ·m + g; θ ← θ − η·(g + μ·m) |
//! | [`AdaGrad`] | s ← s + g²; θ ← θ − η·g / (√s + ε) |
//! | [`RmsProp`] | s ← α·s + (1−α)·g²; θ ← θ − η·g / (√s + ε) |
//! | [`Adam`] | m ← β₁·m + (1−β₁)·g; v ← β₂·v + (1−β₂)·g²; θ ← θ − η·m̂ / (√v̂ + ε) |
//! | [`AdamW`] | θ ← (1 − η·λ)·θ, then Adam's |
//! | [`AdamW8bit`] | AdamW's, with m and v in 8 bits between steps |
//! | [`Lion`] | c ← β₁·m + (1−β₁)·g; m ← β₂·m + (1−β₂)·g; θ ← (1 − η·λ)·θ − η·sign(c) |
//! | [`Adafactor`] | R, C ← means of the rows and columns of g²; u ← g / √(R·C / mean(R)), rms(u) ≤ 1; θ ← (1 − η·λ)·θ − η·u |
//! | [`Muon`] | m ← μ·m + (1−μ)·g; θ ← (1 − η·λ)·θ − η·s·X, the nearest orthogonal matrix to μ·m + (1−μ)·g |
//!
//! | rule | bytes of state per parameter | suited to | source |
//! |---|---|---|---|
//! | [`Adam`], [`AdamW`] | 8 | any parameter | arXiv:1412.6980, arXiv:1711.05101 |
//! | [`AdamW8bit`] | 2.03 | any; tensors below 4096 elements in fp32 | arXiv:2110.02861, bitsandbytes |
//! | [`Lion`] | 4 | any, at a third to a tenth of AdamW's η | arXiv:2302.06675 |
//! | [`Adafactor`] | 4·(1/rows + 1/columns) for a matrix, 4 for a vector | any, at AdamW's η | arXiv:1804.04235, transformers |
//! | [`Muon`] | 4 | matrices between the layers, at AdamW's η; others take AdamW | Jordan et al. 2024, arXiv:2502.16982, `torch.optim.Muon` |
//!
//! In the first six the weight decay is an L2 penalty, g ← g + λ·θ; in the others it is decoupled. The first seven follow PyTorch's
//! conventions, and all have one difference:
//! state and arithmetic of half-precision parameters are fp32, rounded once into the parameter (PyTorch keeps the state in the
//! parameter's dtype). A bf16 number has 8 significant bits: an update below 2⁻⁹ of the parameter is rounded away, and at the learning
//! rates of fine-tuning most are. [`DeviceOptimizer::with_master_weights`] also keeps an fp32 copy of the parameter, which every update
//! reaches; [`DeviceOptimizer::with_stochastic_rounding`] takes no memory, and every update counts on average.
//!
//! ```
//! use tch::{Kind, Tensor, kind};
//! use training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};
//!
//! let w = Tensor::randn([4], kind::FLOAT_CPU).set_requires_grad(true);
//! let group = Group { weight_decay: 0.1, ..Group::new(vec![("w".into(), w.shallow_clone())], 0.05) };
//! let mut optimizer = DeviceOptimizer::new(AdamW::default(), vec![group])?;
//! for _ in 0..200 {
//!     runtime::autograd::backward(&[&(&w - 1.0).square().sum(Kind::Float)])?;
//!     optimizer.step()?;
//!     optimizer.zero_grad(ZeroGrad::ToNone)?;
//! }
//! assert!((w.mean(Kind::Float).double_value(&[]) - 1.0).abs() < 0.1);
//! # Ok::<(), training::Error>(())
//! ```

mod adafactor;
mod adagrad;
mod adam;
mod adam_w;
mod adam_w_8bit;
mod bucket;
mod device_optimizer;
mod group;
mod in_backward;
mod lion;
mod momentum;
mod muon;
mod nesterov;
mod rms_prop;
mod rule;
mod sgd;
mod state;
mod unscale_and_clip;

use std::fmt::Debug;

use models::tensors_file::LazyTensor;
use tch::{Kind, Tensor};

pub use adafactor::Adafactor;
pub use adagrad::AdaGrad;
pub use adam::Adam;
pub use adam_w::AdamW;
pub use adam_w_8bit::AdamW8bit;
pub use device_optimizer::DeviceOptimizer;
pub use group::Group;
pub use in_backward::OptimizerInBackward;
pub use lion::Lion;
pub use momentum::Momentum;
pub use muon::{Muon, MuonScale};
pub use nesterov::Nesterov;
pub use rms_prop::RmsProp;
pub use rule::{Extent, FusedStep, Hyperparameters, Rule, Slot, Tensors};
pub use sgd::Sgd;
pub use state::{WeightVersion, follow_weight};

use crate::clip::{Findings, NonFinite};
use crate::error::Result;
use crate::ranks::Ranks;
use crate::scaler::GradScaler;

/// Updates parameters from their gradients. The calls of a step are, in this order:
///
/// ```text
/// begin │ backward of each micro-batch │ unscale_and_clip │ take_step │ zero_grad
/// ```
///
/// With [`Optimizer::ranks`], `reduce` follows each round of backward passes.
///
/// The optimizer owns the gradients after backward: it unscales them, computes the norm, clips and steps. An optimizer that
/// steps during backward does so as far as the settings of [`Optimizer::begin`] allow.
pub trait Optimizer: Debug + Send {
    /// Checks that the optimizer supports this scaler, before anything is computed.
    ///
    /// # Errors
    /// A scaler that the optimizer does not support, with the reason and an alternative.
    fn check(&self, scaler: &mut dyn GradScaler) -> Result<()> {
        let _ = scaler;
        Ok(())
    }

    /// Starts a step, before its first backward.
    ///
    /// # Errors
    /// Settings outside their ranges; a step that was not ended.
    fn begin(&mut self, settings: StepSettings) -> Result<()>;

    /// Returns why a graph cannot repeat the steps; `None` if it can, with [`StepSettings::on_device`].
    fn refuses_capture(&self) -> Option<String> {
        Some("the optimizer steps on the host".to_owned())
    }

    /// Notes that a graph has repeated everything between [`Optimizer::begin`] and the end of the step.
    ///
    /// # Errors
    /// Errors of libtorch.
    fn note_replay(&mut self) -> Result<()> {
        Ok(())
    }

    /// Announces the step's loss, or a positive multiple of it, one element on any device, before [`Optimizer::unscale_and_clip`]: one
    /// that is not finite counts as a gradient that is not.
    fn watch_loss(&mut self, loss: &Tensor) {
        let _ = loss;
    }

    /// Unscales and clips the gradients, updates the scale, and decides whether to skip the step.
    ///
    /// # Errors
    /// [`NonFinite::Fail`] and a loss or gradient that is not finite; those of the scaler.
    fn unscale_and_clip(&mut self, scaler: &mut dyn GradScaler) -> Result<StepDecision>;

    /// Updates every parameter that has a gradient, unless the step is skipped.
    ///
    /// # Errors
    /// A sparse gradient; an optimizer that cannot skip a step on the device.
    fn take_step(&mut self, decision: &StepDecision) -> Result<()>;

    /// Clears all gradients, also after a skipped step.
    ///
    /// # Errors
    /// Errors of libtorch.
    fn zero_grad(&mut self, how: ZeroGrad) -> Result<()>;

    /// Ends a step that failed, at whatever point, without an update: clears all gradients. Returns whether weights and state are as they
    /// were before [`Optimizer::begin`]; false if that is not known. After false they have to be loaded before the next step.
    ///
    /// # Errors
    /// Errors of libtorch.
    fn abandon(&mut self, how: ZeroGrad) -> Result<bool> {
        self.zero_grad(how).map(|()| false)
    }

    /// The data-parallel ranks that share the parameters; `None` for one process alone. All ranks make the same calls in the
    /// same order.
    fn ranks(&self) -> Option<Ranks> {
        None
    }

    /// Adds the gradients of a round, at most one micro-batch of each rank, to the step's, and clears the parameters' own.
    /// Called after every round; does nothing without ranks.
    ///
    /// # Errors
    /// A rank that failed.
    fn reduce(&mut self) -> Result<()> {
        Ok(())
    }

    /// Returns whether a parameter has got a gradient since [`Optimizer::begin`], also if `reduce` has moved it on.
    ///
    /// # Errors
    /// Errors of libtorch.
    fn has_gradient(&self, tensor: &Tensor) -> Result<bool> {
        Ok(tensor.f_grad()?.defined())
    }

    /// Returns whether forward and backward communicate, because ranks hold shards of the weights. Then all ranks must run the same
    /// number of passes in each round of micro-batches and in each evaluation.
    fn passes_communicate(&self) -> bool {
        false
    }

    /// Sets whether the next backward runs only to take part in the other ranks' communication: its gradients are discarded.
    fn set_idle(&mut self, idle: bool) {
        let _ = idle;
    }

    /// Returns the values of one of the model's tensors, whole. All ranks call it, in the same order.
    ///
    /// # Errors
    /// A rank that failed.
    fn whole_weight(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(tensor.f_detach()?)
    }

    /// Returns a named tensor whose values are read when it is written; rank 0 receives them.
    fn lazy_weight<'a>(&'a self, name: String, tensor: &Tensor) -> LazyTensor<'a> {
        LazyTensor::from_tensor(name, tensor)
    }

    /// Writes the values of one of the model's tensors, which are the same on all ranks.
    ///
    /// # Errors
    /// Errors of libtorch.
    fn set_weight(&self, tensor: &Tensor, values: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        Ok(tensor.f_detach()?.f_copy_(values)?)
    }

    /// Returns the trained weights, as far as this rank has them.
    fn own_weights(&self) -> Vec<Tensor> {
        let parameters = self.groups().iter().flat_map(|group| &group.parameters);
        parameters.map(|(_, weight)| weight.shallow_clone()).collect()
    }

    /// Waits until all steps are done, so that weights can be read.
    ///
    /// # Errors
    /// A failure of a step.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// The parameter groups.
    fn groups(&self) -> &[Group];

    /// The rule of groups without their own.
    fn rule(&self) -> &dyn Rule;

    /// The learning rate of each group's next step.
    fn learning_rates(&self) -> Vec<f64>;

    /// Returns the state as named tensors: `NAME.step` (int64 scalar) and one `NAME.SLOT` per slot of its rule, for every
    /// parameter that was stepped. Optimizers with the same rule use the same names, so they can load each other's checkpoints.
    ///
    /// # Errors
    /// A failure of an earlier step.
    fn state(&self) -> Result<Vec<(String, Tensor)>>;

    /// [`Optimizer::state`], with values that are read when they are written. With [`Optimizer::ranks`], every rank gets the same tensors, and rank 0
    /// the values of weights that are sharded over ranks.
    ///
    /// # Errors
    /// A failure of an earlier step.
    fn lazy_state(&self) -> Result<Vec<LazyTensor<'_>>> {
        Ok(LazyTensor::from_tensors(&self.state()?))
    }

    /// Loads a state from [`Optimizer::state`]. The state of a parameter without any tensor in it is reset.
    ///
    /// # Errors
    /// All names that are missing, unknown, or of another shape or dtype; then nothing is changed.
    fn load_state(&mut self, tensors: &[(String, Tensor)]) -> Result<()>;

    /// Returns the bytes of the state, on any device.
    fn state_bytes(&self) -> u64;
}

/// Settings of a step, for [`Optimizer::begin`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepSettings {
    /// Gradient accumulation steps: the number of backward passes.
    pub micro_batches: u64,
    /// Factor of every group's learning rate, from an [`LrSchedule`](crate::LrSchedule).
    pub factor: f64,
    /// Maximum gradient norm.
    pub clip: Option<f64>,
    /// The reaction to a loss or gradient that is not finite.
    pub non_finite: NonFinite,
    /// Whether what differs from step to step is on the device, so that a graph can repeat the step: the learning rates, which
    /// [`Optimizer::begin`] writes there, and the decision to skip. Only where [`Optimizer::refuses_capture`] returns `None`.
    pub on_device: bool,
}

impl Default for StepSettings {
    /// One micro-batch, the groups' learning rates, no clipping.
    fn default() -> Self {
        Self { micro_batches: 1, factor: 1.0, clip: None, non_finite: NonFinite::default(), on_device: false }
    }
}

impl StepSettings {
    /// Decides on the host: updates the scale, and returns whether to skip the step. `culprit` names a parameter whose gradient is not
    /// finite, for the error.
    ///
    /// # Errors
    /// [`NonFinite::Fail`] and a loss or gradient that is not finite; those of the scaler and of `culprit`.
    pub fn skips(
        &self,
        findings: &Findings,
        scaler: &mut dyn GradScaler,
        culprit: impl FnOnce() -> Result<Option<String>>,
    ) -> Result<bool> {
        scaler.update(findings.overflow)?;
        match self.non_finite {
            _ if findings.overflow => Ok(true),
            _ if findings.are_finite() => Ok(false),
            NonFinite::Skip => Ok(true),
            NonFinite::Ignore => Ok(false),
            NonFinite::Fail => Err(findings.error(culprit()?.as_deref())),
        }
    }
}

/// The decision of [`Optimizer::unscale_and_clip`], and where it is known.
#[derive(Debug)]
pub enum StepDecision {
    /// On the host.
    Host {
        /// The gradient norm before clipping, if clipping.
        norm: Option<f64>,
        /// Whether to skip the step.
        skip: bool,
        /// Whether it is skipped because gradients overflowed under a scaler.
        overflow: bool,
    },
    /// On the device, with a [`DeviceGradScaler`](crate::scaler::DeviceGradScaler), or on CUDA without a scaler.
    Device {
        /// A float scalar: 1 to skip the step.
        skip: Tensor,
        /// For the step's record, fp64: whether it is skipped, whether because of an overflow, the norm (NaN without clipping),
        /// the scale of the step, then [`DeviceGradScaler::device_state`](crate::scaler::DeviceGradScaler::device_state) after
        /// it, if there is one.
        figures: Tensor,
    },
}

/// How a step is executed. The results agree up to rounding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Implementation {
    /// One parameter at a time: the least temporary memory, the most calls.
    ForLoop,
    /// Each operation over all parameters at once: few kernels on CUDA, temporaries as large as the parameters.
    Foreach,
    /// The whole update in one kernel without temporaries, for rules that have one ([`Adam`], [`AdamW`]); otherwise `Foreach`.
    #[default]
    Fused,
}

/// How gradients are cleared between steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum ZeroGrad {
    /// Frees their memory; the next backward stores instead of adding.
    #[default]
    ToNone,
    /// Fills them with zeros, which costs a pass over memory now and another at the next backward. A parameter without a
    /// gradient stays without.
    ToZeros,
}

/// The dtype in which a parameter of `kind` is computed.
fn work_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}
