//! Optimizers: what a [`Trainer`](crate::Trainer) steps with, and the ordinary one, a [`Rule`] over parameter groups.
//!
//! [`Optimizer`] is the trait. [`DeviceOptimizer`] implements it: state and step are where the parameters are. One whose state is
//! elsewhere (`offload::HostAdamW`) implements it too, and reads and writes the same checkpoints.
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
//!
//! In all but AdamW the weight decay is the gradient of an L2 penalty: g ← g + λ·θ. All follow PyTorch's conventions. What
//! differs: state and arithmetic of a half-precision parameter are fp32, rounded once into the parameter (PyTorch keeps
//! the state in the parameter's own dtype); with [`DeviceOptimizer::with_master_weights`] the unrounded parameter is kept too.
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

mod adagrad;
mod adam;
mod adam_w;
mod bucket;
mod device_optimizer;
mod group;
mod momentum;
mod nesterov;
mod rms_prop;
mod rule;
mod sgd;
mod state;
mod unscale_and_clip;

use std::fmt::Debug;

use tch::{Kind, Tensor};

pub use adagrad::AdaGrad;
pub use adam::Adam;
pub use adam_w::AdamW;
pub use device_optimizer::DeviceOptimizer;
pub use group::Group;
pub use momentum::Momentum;
pub use nesterov::Nesterov;
pub use rms_prop::RmsProp;
pub use rule::{Hyper, Rule, Tensors};
pub use sgd::Sgd;

use crate::clip::NonFinite;
use crate::error::Result;
use crate::scaler::GradScaler;

/// What a [`Trainer`](crate::Trainer) steps with. One step is, in this order:
///
/// ```text
/// begin │ backward of each micro-batch │ unscale_and_clip │ take_step │ zero_grad
/// ```
///
/// All that happens to gradients after backward belongs to the optimizer, which knows where they are and when they are needed:
/// one owner unscales, takes the norm, clips and steps. An optimizer that steps within backward does so as far as the settings of
/// [`Optimizer::begin`] allow.
pub trait Optimizer: Debug + Send {
    /// Checks that it can train with this scaler, before anything is computed.
    ///
    /// # Errors
    /// A scaler that the optimizer cannot use: why, and what to use instead.
    fn check(&self, scaler: &mut dyn GradScaler) -> Result<()> {
        let _ = scaler;
        Ok(())
    }

    /// Announces a step, before its first backward.
    ///
    /// # Errors
    /// Settings outside their ranges; a step that was begun and not ended.
    fn begin(&mut self, settings: StepSettings) -> Result<()>;

    /// Unscales and clips the gradients of the step, moves the scale, and decides whether the step is taken.
    ///
    /// # Errors
    /// [`NonFinite::Fail`] and a norm that is not finite; those of the scaler.
    fn unscale_and_clip(&mut self, scaler: &mut dyn GradScaler) -> Result<StepDecision>;

    /// Changes every parameter that has a gradient, unless the step is left out.
    ///
    /// # Errors
    /// A sparse gradient; an optimizer that cannot leave a step out on the device.
    fn take_step(&mut self, decision: &StepDecision) -> Result<()>;

    /// Removes or clears all gradients, also those of a step that is not taken.
    ///
    /// # Errors
    /// Those of libtorch.
    fn zero_grad(&mut self, how: ZeroGrad) -> Result<()>;

    /// Waits until every step that was taken is done, so that weights can be read.
    ///
    /// # Errors
    /// A failure of such a step.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// The parameter groups.
    fn groups(&self) -> &[Group];

    /// The rule of all groups that have none of their own.
    fn rule(&self) -> &dyn Rule;

    /// The learning rate of each group's next step.
    fn learning_rates(&self) -> Vec<f64>;

    /// The state as named tensors: `NAME.step` (int64 scalar) and one `NAME.SLOT` for each of the rule's slots, for every parameter
    /// that has been stepped. Optimizers of one rule have equal names, so that a checkpoint of one can be read by another.
    ///
    /// # Errors
    /// A failure of a step that was waited for.
    fn state(&self) -> Result<Vec<(String, Tensor)>>;

    /// Loads what [`Optimizer::state`] returned. A parameter without any tensor in it starts anew.
    ///
    /// # Errors
    /// All names that are missing, not known, or of another shape or dtype; nothing is changed then.
    fn load_state(&mut self, tensors: &[(String, Tensor)]) -> Result<()>;

    /// Bytes of the state, wherever it is.
    fn state_bytes(&self) -> u64;
}

/// What a step is, as [`Optimizer::begin`] is told.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepSettings {
    /// Gradient accumulation steps: backward passes whose gradients are summed.
    pub micro_batches: u64,
    /// What multiplies every group's learning rate: a [`Schedule`](crate::Schedule)'s factor.
    pub factor: f64,
    /// Maximum norm of all gradients.
    pub clip: Option<f64>,
    /// What to do where that norm is not finite.
    pub non_finite: NonFinite,
}

impl Default for StepSettings {
    /// One micro-batch, the groups' learning rates, no clipping.
    fn default() -> Self {
        Self { micro_batches: 1, factor: 1.0, clip: None, non_finite: NonFinite::default() }
    }
}

/// What [`Optimizer::unscale_and_clip`] decided, and where that is known.
#[derive(Debug)]
pub enum StepDecision {
    /// On the host.
    Host {
        /// The gradients' norm before clipping, where there is clipping.
        norm: Option<f64>,
        /// Whether the step is left out.
        skip: bool,
        /// Whether it is because gradients overflowed under a scaler.
        overflow: bool,
    },
    /// On the device, with a [`DeviceSide`](crate::scaler::DeviceSide) scaler.
    Device {
        /// A float scalar: 1 where the step is left out.
        skip: Tensor,
        /// For the step's record, fp64: whether it is left out, whether for an overflow, the norm (NaN without clipping), the scale
        /// that the step had, then [`DeviceSide::position`](crate::scaler::DeviceSide::position) after it.
        figures: Tensor,
    },
}

/// How a step runs over the parameters. The results agree to rounding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Implementation {
    /// One parameter after the other: the least temporary memory, the most calls.
    ForLoop,
    /// Each operation over all parameters at once: few kernels on CUDA, temporaries as large as the parameters.
    Foreach,
    /// The whole update in one kernel, without temporaries, where the rule has one ([`Adam`], [`AdamW`]); else `Foreach`.
    #[default]
    Fused,
}

/// What becomes of the gradients between steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum ZeroGrad {
    /// Their memory is freed; the next backward stores instead of adding.
    #[default]
    ToNone,
    /// They are filled with zeros, which costs a pass over memory now and another at the next backward. A parameter without
    /// a gradient stays without.
    ToZeros,
}

/// The dtype that a parameter of `kind` is computed in.
fn work_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}
