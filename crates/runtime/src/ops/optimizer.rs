//! Optimizer steps in one kernel.

use std::borrow::Borrow;

use tch::Tensor;

use crate::error::{Error, Result};
use crate::sys::optimizer as sys;

/// The hyperparameters of a step of Adam or AdamW; the defaults are those of PyTorch's AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// AdamW: the parameter shrinks by `lr · weight_decay`. Adam: `weight_decay · parameter` is added to the gradient.
    pub weight_decay: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Whether to maximize the objective.
    pub maximize: bool,
}

impl Default for AdamW {
    fn default() -> Self {
        Self { lr: 1e-3, beta1: 0.9, beta2: 0.999, weight_decay: 1e-2, eps: 1e-8, maximize: false }
    }
}

/// The tensors of a step: lists of the same length and order. Parameters, gradients and moments of one index have the
/// same shape, and all have one kind: the kernel refuses mixed kinds.
#[derive(Debug)]
pub struct AdamWTensors<'a, T> {
    /// The parameters.
    pub params: &'a [T],
    /// Their gradients.
    pub grads: &'a [T],
    /// First moments.
    pub exp_avgs: &'a [T],
    /// Second moments.
    pub exp_avg_sqs: &'a [T],
    /// For each parameter a float scalar tensor on its device: the number of completed steps.
    pub steps: &'a [T],
}

/// For a gradient scaler: the kernel divides the gradients by `scale`, and skips the step if `found_inf` is 1. Both are
/// float tensors of one element on the parameters' device; the host reads neither.
#[derive(Debug, Clone, Copy)]
pub struct Unscale<'a> {
    /// The loss scale; `None` for gradients that are unscaled already.
    pub scale: Option<&'a Tensor>,
    /// 1 if a gradient was infinite or NaN, else 0; no other value.
    pub found_inf: &'a Tensor,
}

/// Runs one step of AdamW over all parameters, in place and without a graph (`_fused_adamw_`; Loshchilov & Hutter,
/// arXiv:1711.05101).
///
/// The steps are incremented before the kernel runs, because it corrects the bias with 1 − βᵗ: with t = 0 it would divide by zero.
/// If `found_inf` skips the step, they are decremented again.
///
/// # Errors
/// [`Error::Invalid`] for lists of different lengths; errors of libtorch.
pub fn fused_adamw_<T: Borrow<Tensor>>(
    tensors: &AdamWTensors<'_, T>,
    options: AdamW,
    unscale: Option<Unscale<'_>>,
) -> Result<()> {
    fused("fused_adamw_", true, tensors, options, None, unscale)
}

/// Runs one step of Adam over all parameters, in place and without a graph (`_fused_adam_`; Kingma & Ba, arXiv:1412.6980). As
/// [`fused_adamw_`], except that the weight decay is the gradient of an L2 penalty.
///
/// # Errors
/// As [`fused_adamw_`].
pub fn fused_adam_<T: Borrow<Tensor>>(
    tensors: &AdamWTensors<'_, T>,
    options: AdamW,
    unscale: Option<Unscale<'_>>,
) -> Result<()> {
    fused("fused_adam_", false, tensors, options, None, unscale)
}

/// [`fused_adamw_`] if `decoupled`, else [`fused_adam_`], with the learning rate in a scalar on the parameters' device, fp64 on a CPU and
/// fp32 on others, which the host does not read, instead of [`AdamW::lr`]. For steps that a graph repeats.
///
/// # Errors
/// As [`fused_adamw_`].
pub fn fused_adam_at_rate_<T: Borrow<Tensor>>(
    tensors: &AdamWTensors<'_, T>,
    options: AdamW,
    decoupled: bool,
    rate: &Tensor,
    unscale: Option<Unscale<'_>>,
) -> Result<()> {
    let name = if decoupled { "fused_adamw_" } else { "fused_adam_" };
    fused(name, decoupled, tensors, options, Some(rate), unscale)
}

fn fused<T: Borrow<Tensor>>(
    name: &'static str,
    decoupled: bool,
    tensors: &AdamWTensors<'_, T>,
    options: AdamW,
    rate: Option<&Tensor>,
    unscale: Option<Unscale<'_>>,
) -> Result<()> {
    let AdamWTensors { params, grads, exp_avgs, exp_avg_sqs, steps } = *tensors;
    let lengths = [params.len(), grads.len(), exp_avgs.len(), exp_avg_sqs.len(), steps.len()];
    if lengths.iter().any(|&length| length != params.len()) {
        let reason = format!(
            "params, grads, exp_avgs, exp_avg_sqs and steps have {lengths:?} tensors; leave out parameters without a \
             gradient from all of them"
        );
        return Err(Error::invalid(name, reason));
    }
    if params.is_empty() {
        return Ok(());
    }
    let AdamW { lr, beta1, beta2, weight_decay, eps, maximize } = options;
    let (decoupled, maximize) = (decoupled.into(), maximize.into());
    let as_operators = super::needs_operators().into();
    let options = sys::RawAdam { lr, beta1, beta2, weight_decay, eps, decoupled, maximize, as_operators };
    let (scale, found_inf) =
        unscale.map_or((None, None), |Unscale { scale, found_inf }| (scale, Some(found_inf)));
    // The kernel increments no versions; the call does, so that a graph that saved a parameter detects the change, and caches of casts or
    // device copies are not stale.
    sys::fused_adam(options, [params, grads, exp_avgs, exp_avg_sqs, steps], [rate, scale, found_inf])
}
