//! Gradient clipping by norm (Pascanu, Mikolov & Bengio, arXiv:1211.5063): with N the 2-norm of all gradients as one vector,
//! each is multiplied by min(1, limit / (N + 10⁻⁶)).
//!
//! A norm that is not finite means that a gradient is not: one number answers both questions, so a training step needs at most
//! one synchronisation with the device ([`Norm::read`]), or none ([`scale_to_`]). A step that is not clipped reads its gradients once to
//! find one that is not finite ([`found_non_finite`]), unless [`NonFinite::Ignore`] allows them.

use std::borrow::Borrow;

use kernels::gradients;
use runtime::file_memory;
use runtime::ops::TryScalar;
use runtime::ops::foreach;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

/// Keeps the quotient finite for zero gradients, as PyTorch does.
const EPS: f64 = 1e-6;

/// The reaction to a step whose loss or gradients are not finite, with or without clipping.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NonFinite {
    /// Skips the step, and marks it in its record.
    #[default]
    Skip,
    /// Ends the training with an error.
    Fail,
    /// Continues as PyTorch does: an infinite norm makes all gradients 0 or NaN.
    Ignore,
}

/// The host's figures of a step before its update.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Findings {
    /// The loss, up to a factor; `None` where it is not known.
    pub loss: Option<f64>,
    /// The gradient norm, if it was computed.
    pub norm: Option<f64>,
    /// Whether a gradient is infinite or NaN, as far as that is known without a norm.
    pub non_finite: bool,
    /// Whether gradients overflowed under a scaler.
    pub overflow: bool,
}

impl Findings {
    /// Returns whether the loss and all gradients are finite, as far as they are known.
    pub fn are_finite(&self) -> bool {
        let finite = |number: Option<f64>| number.is_none_or(f64::is_finite);
        finite(self.loss) && finite(self.norm) && !self.non_finite
    }

    /// The error of a step that is neither skipped nor taken; `culprit` is a parameter whose gradient is not finite.
    pub fn error(&self, culprit: Option<&str>) -> Error {
        let culprit_name = culprit.map_or_else(String::new, |name| format!(" (of `{name}` first)"));
        match *self {
            Self { norm: Some(norm), .. } if !norm.is_finite() => {
                not_finite(&format!("the gradients' norm is {norm}{culprit_name}"))
            }
            Self { non_finite: true, .. } => {
                not_finite(&format!("a gradient is infinite or NaN{culprit_name}"))
            }
            Self { loss, .. } => not_finite(&format!("the loss is {}", loss.unwrap_or(f64::NAN))),
        }
    }
}

/// Returns whether a gradient is infinite or NaN: float `[1]` on the first one's device, 1 if so, from one read of each and without
/// synchronising.
///
/// # Errors
/// Errors of libtorch.
pub fn found_non_finite(grads: &[impl Borrow<Tensor>]) -> Result<Tensor> {
    let mut flags = Vec::new();
    let (in_files, others): (Vec<&Tensor>, Vec<&Tensor>) =
        grads.iter().map(Borrow::borrow).partition(|grad| file_memory::is_in_file(grad));
    // One by one, so that those in files need memory only while they are read.
    for grad in in_files {
        flags.push(gradients::found_non_finite(&[grad])?);
        file_memory::release(grad)?;
    }
    let of_others = gradients::found_non_finite(&others)?;
    for one in flags {
        let one = one.f_to_device(of_others.device())?;
        of_others.shallow_clone().f_copy_(&of_others.f_maximum(&one)?)?;
    }
    Ok(of_others)
}

/// Returns the first of the named tensors that has an infinity or a NaN; waits for the device.
///
/// # Errors
/// Errors of libtorch.
pub fn first_non_finite<'a>(named: impl IntoIterator<Item = (&'a str, Tensor)>) -> Result<Option<&'a str>> {
    for (name, tensor) in named {
        if found_non_finite(&[tensor])?.f_double_value(&[0])? != 0.0 {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// A norm that may not have been copied from the device yet.
#[derive(Debug)]
pub struct Norm {
    tensor: Tensor,
}

impl Norm {
    /// Wraps a norm that was computed elsewhere: a scalar, fp32 or fp64.
    pub fn known(tensor: Tensor) -> Self {
        Self { tensor }
    }

    /// Returns the scalar on the device, fp32 or fp64.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Waits for the value.
    ///
    /// # Errors
    /// An asynchronous error of the device.
    pub fn read(&self) -> Result<f64> {
        Ok(self.tensor.f_double_value(&[])?)
    }
}

/// Computes the 2-norm of all gradients as one vector, without synchronising; 0 without gradients. Half-precision gradients are
/// squared and summed in fp32 (fp16 would overflow from 256 on). On CUDA one kernel reads each gradient once, and adds up in fp64
/// ([`gradients::norm_many`]).
///
/// # Errors
/// Errors of libtorch.
pub fn norm(grads: &[impl Borrow<Tensor>]) -> Result<Norm> {
    let _no_grad = tch::no_grad_guard();
    let Some(first) = grads.first().map(Borrow::borrow) else {
        return Ok(Norm { tensor: Tensor::f_zeros([] as [i64; 0], (Kind::Float, Device::Cpu))? });
    };
    let device = first.device();
    if let Some(tensor) = gradients::norm_many(grads)? {
        return Ok(Norm { tensor });
    }
    let double = grads.iter().any(|grad| grad.borrow().kind() == Kind::Double);
    let kind = if double { Kind::Double } else { Kind::Float };
    let (mut single, mut half) = (Vec::new(), Vec::new());
    for grad in grads.iter().map(Borrow::borrow) {
        let low = matches!(grad.kind(), Kind::Half | Kind::BFloat16);
        if low { &mut half } else { &mut single }.push(grad.f_detach()?);
    }
    let mut norms = Vec::new();
    if device == Device::Cpu {
        // One by one, so that those in files need memory only while they are read.
        for grad in &single {
            norms.extend(foreach::norm(&[grad], 2.0)?);
            file_memory::release(grad)?;
        }
    } else {
        norms.extend(foreach::norm(&single, 2.0)?);
    }
    for grad in half {
        norms.push(grad.try_norm_scalaropt_dtype(2.0, Kind::Float)?);
        file_memory::release(&grad)?;
    }
    let norms: Vec<Tensor> =
        norms.iter().map(|norm| Ok(norm.f_to_device(device)?.f_to_kind(kind)?)).collect::<Result<_>>()?;
    Ok(Norm { tensor: Tensor::f_stack(&norms, 0)?.f_norm()? })
}

/// Multiplies the gradients by min(1, limit / (norm + 10⁻⁶)) in place, on the device, without synchronising. A norm that is not
/// finite makes them NaN or 0: see [`clip_`]. On CUDA gradients within the limit are neither read nor written
/// ([`gradients::scale_many_`]).
///
/// # Errors
/// A limit that is not positive; those of libtorch.
pub fn scale_to_(grads: &[impl Borrow<Tensor>], norm: &Norm, limit: f64) -> Result<()> {
    check(limit)?;
    let _no_grad = tch::no_grad_guard();
    // In fp64 and divided once, as on the host: the bits do not depend on where it is computed.
    let norm = norm.tensor.f_to_kind(Kind::Double)?;
    let factor = norm.try_full_like(limit)?.f_div(&norm.try_add_scalar(EPS)?)?.try_clamp_max(1.0)?;
    multiply(grads, &factor)
}

/// Clips the gradients in place and returns their norm before clipping; synchronises once. If the norm is not finite the
/// gradients stay unchanged, unless `non_finite` is [`NonFinite::Ignore`].
///
/// # Errors
/// A limit that is not positive; [`NonFinite::Fail`] and a norm that is not finite; those of libtorch.
pub fn clip_(grads: &[impl Borrow<Tensor>], limit: f64, non_finite: NonFinite) -> Result<f64> {
    check(limit)?;
    let norm = norm(grads)?;
    let value = norm.read()?;
    if value.is_finite() || non_finite == NonFinite::Ignore {
        scale_to_known_(grads, value, limit)?;
    } else if non_finite == NonFinite::Fail {
        return Err(Findings { norm: Some(value), ..Findings::default() }.error(None));
    }
    Ok(value)
}

/// Returns the factor for gradients of norm `norm`; `None` if they are within the limit.
pub fn factor(norm: f64, limit: f64) -> Option<f64> {
    let factor = limit / (norm + EPS);
    (factor < 1.0).then_some(factor)
}

/// [`scale_to_`] with a norm that the host knows: does nothing within the limit.
///
/// # Errors
/// Errors of libtorch.
pub fn scale_to_known_(grads: &[impl Borrow<Tensor>], norm: f64, limit: f64) -> Result<()> {
    let Some(factor) = factor(norm, limit) else { return Ok(()) };
    let _no_grad = tch::no_grad_guard();
    let grads: Vec<Tensor> = grads.iter().map(|grad| grad.borrow().f_detach()).collect::<Result<_, _>>()?;
    Ok(foreach::mul_scalar_(&grads, factor)?)
}

fn not_finite(what: &str) -> Error {
    let reason = format!(
        "{what}; look for a division by zero or an overflow in the loss, lower the learning rate, or skip such steps with \
         NonFinite::Skip"
    );
    Error::config("non-finite gradients", reason)
}

/// Refuses a limit that is not positive.
///
/// # Errors
/// A limit that is not positive.
pub fn check(limit: f64) -> Result<()> {
    if limit.is_finite() && limit > 0.0 {
        return Ok(());
    }
    Err(Error::config("gradient clipping", format!("the limit is {limit}; expected a positive number")))
}

/// One call for each device and dtype, because libtorch's in-place multiplication needs a factor of the same.
fn multiply(grads: &[impl Borrow<Tensor>], factor: &Tensor) -> Result<()> {
    if gradients::scale_many_(grads, &factor.f_to_kind(Kind::Float)?)? {
        return Ok(());
    }
    let mut rest: Vec<Tensor> =
        grads.iter().map(|grad| grad.borrow().f_detach()).collect::<Result<_, _>>()?;
    while let Some((device, kind)) = rest.first().map(|grad| (grad.device(), grad.kind())) {
        let alike = |grad: &Tensor| grad.device() == device && grad.kind() == kind;
        let (these, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(alike);
        foreach::mul_tensor_(&these, &factor.f_to_device(device)?.f_to_kind(kind)?)?;
        rest = others;
    }
    Ok(())
}
